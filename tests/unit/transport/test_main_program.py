"""A program that is run inside of a process is what Python would run: its names, arguments, errors and traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from hvlike.errors import UsageError
from hvlike.transport.host.main_program import find_program, run_program
try:
    sys.exit(run_program(find_program(sys.argv[1:])))
except UsageError as error:
    sys.exit(f"not found: {error}")
"""
SHOW = """
import sys
print(__name__, __file__, __package__ or None, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
print(__spec__ and __spec__.name)
class Pickled: pass
import pickle
print(type(pickle.loads(pickle.dumps(Pickled()))) is Pickled)
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some programs."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for path in (tmp_path / "show.py", package / "inner.py", package / "__main__.py"):
        path.write_text(SHOW)
    (tmp_path / "raises.py").write_text("def divide():\n    return 1 / 0\n\ndivide()\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(7)\n")
    (tmp_path / "wrong.py").write_text("def :\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [["show.py", "a", "-m"], ["-m", "show", "a"], ["-m", "package.inner"], ["-m", "package", "b"], ["raises.py"],
     ["exits.py"]],
)  # fmt: skip
def test_it_is_what_python_runs(folder: Path, arguments: list[str]) -> None:
    done, expected = python(folder, "-c", RUN, *arguments), python(folder, *arguments)
    assert (done.stdout, done.stderr, done.returncode) == (expected.stdout, expected.stderr, expected.returncode)


def test_a_program_that_does_not_compile_is_shown(folder: Path) -> None:
    done = python(folder, "-c", RUN, "wrong.py")
    assert done.returncode == 1
    assert done.stderr.endswith("SyntaxError: invalid syntax\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.py"], "can't open file '{folder}/none.py': No such file or directory"),
        (["package"], "can't open file '{folder}/package': Is a directory"),
        (["-m", "none"], "-m none: there is no such module"),
        (["-m", "none.inner"], "-m none.inner: No module named 'none'"),
        (["-m"], "the name of a module is missing"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(folder: Path, arguments: list[str], text: str) -> None:
    done = python(folder, "-c", RUN, *arguments)
    assert done.stderr.startswith(f"not found: {text.format(folder=folder)}" if "{" in text else "not found: ")
    assert text.format(folder=folder) in done.stderr
    assert len(done.stderr.splitlines()) == 1

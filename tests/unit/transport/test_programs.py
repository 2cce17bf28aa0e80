"""A program that is run inside of a process is what Python would run, and what it prints is seen on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlike.transport.host import parents
from hvlike.transport.host.parents import columns_of_terminal

RUN_ALL = """
import json, os, sys
from hvlike.errors import UsageError
from hvlike.transport.host.main_program import find_program, run_program
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{number}-{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            sys.exit(run_program(find_program(arguments)))
        except UsageError as error:
            sys.exit(f"not found: {error}")
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
SHOW = """
import sys
print(__name__, __file__, __package__ or None, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
print(__spec__ and __spec__.name)
class Pickled: pass
import pickle
print(type(pickle.loads(pickle.dumps(Pickled()))) is Pickled)
"""


RUNS: list[list[str]] = [
    *(["show.py", "a", "-m"], ["-m", "show", "a"], ["-m", "package.inner"], ["-m", "package", "b"]),
    *(["raises.py"], ["exits.py"]),
]
MISSING: list[tuple[list[str], str]] = [
    (["none.py"], "can't open file '{folder}/none.py': No such file or directory"),
    (["package"], "can't open file '{folder}/package': Is a directory"),
    (["-m", "none"], "-m none: there is no such module, or it is no program in Python"),
    (["-m", "none.inner"], "-m none.inner: No module named 'none'"),
    (["-m"], "-m: the name of a module is missing"),
]
Outcome = tuple[int, str, str]
"""Exit status, stdout and stderr."""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some programs."""
    folder = tmp_path_factory.mktemp("programs")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for path in (folder / "show.py", package / "inner.py", package / "__main__.py"):
        path.write_text(SHOW)
    (folder / "raises.py").write_text("def divide():\n    return 1 / 0\n\ndivide()\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(7)\n")
    (folder / "wrong.py").write_text("def :\n")
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    """How each of them ends in a process that has hvlike, which is imported once."""
    lines = [*RUNS, ["wrong.py"], *(arguments for arguments, _ in MISSING)]
    done = python(folder, "-c", RUN_ALL, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    statuses = list(map(int, done.stdout.split()))
    texts = [
        [(folder / f"{number}-{name}").read_text() for name in ("stdout", "stderr")] for number in range(len(lines))
    ]
    return {" ".join(line): (status, *said) for line, status, said in zip(lines, statuses, texts, strict=True)}


@pytest.mark.parametrize("line", [" ".join(each) for each in RUNS])
def test_it_is_what_python_runs(folder: Path, outcomes: dict[str, Outcome], line: str) -> None:
    expected = python(folder, *line.split())
    assert outcomes[line] == (expected.returncode, expected.stdout, expected.stderr)


def test_a_program_that_does_not_compile_is_shown(outcomes: dict[str, Outcome]) -> None:
    status, _, said = outcomes["wrong.py"]
    assert status == 1
    assert said.endswith("SyntaxError: invalid syntax\n")


@pytest.mark.parametrize(("arguments", "text"), MISSING)
def test_what_is_not_there_is_said_in_one_line(
    folder: Path, outcomes: dict[str, Outcome], arguments: list[str], text: str
) -> None:
    assert outcomes[" ".join(arguments)] == (1, "", f"not found: {text.format(folder=folder)}\n")


# Without the package, which would import torch.
CHILD = f"""
import sys
sys.path.insert(0, {str(Path(parents.__file__).parent)!r})
import parents
print(parents.columns_of_terminal())
"""


@pytest.fixture
def pty() -> Iterator[int]:
    """The file descriptor of a terminal of 123 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
    yield theirs
    os.close(theirs)
    os.close(ours)


def launched(name: str, stderr: int, folder: Path) -> str:
    """What a child of a launcher of this name says, whose own stderr is a pipe."""
    launcher = folder / name
    shutil.copy("/bin/sh", launcher)
    (folder / "child.py").write_text(CHILD)
    # The last word keeps the shell from making way for its child.
    command = f"{shlex.join([sys.executable, str(folder / 'child.py')])} 2>&1 | cat; true"
    done = subprocess.run([launcher, "-c", command], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)
    return done.stdout.strip()


def test_the_launchers_terminal_is_found(pty: int, tmp_path: Path) -> None:
    assert launched("mpirun", pty, tmp_path) == "123"
    assert launched("prterun", subprocess.DEVNULL, tmp_path) == "None"


def test_a_parent_that_is_no_launcher_shows_nothing(pty: int, tmp_path: Path) -> None:
    assert launched("nohup", pty, tmp_path) == "None"


@pytest.mark.parametrize("path", [None, "pipe:[12345]", "/tmp/log", "/dev/pts/no-such"])
def test_what_is_no_terminal(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        assert columns_of_terminal(lambda: path) is None


def test_a_terminal_of_ones_own(pty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(pty), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert columns_of_terminal() == 123
    assert columns_of_terminal() is None  # closed
    monkeypatch.setattr(sys, "stderr", None)
    assert columns_of_terminal() is None


class Bare:
    """What a program puts in place of stderr: it can write, and nothing else."""

    def write(self, text: str) -> None: ...


class Hostile:
    def __getattr__(self, name: str) -> object:
        raise ValueError(name)


@pytest.mark.parametrize("kind", [Bare, Hostile])
def test_a_stream_of_the_programs_own_is_no_terminal_but_the_launchers_may_be_one(
    kind: type[object], pty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", kind())
    assert columns_of_terminal(lambda: None) is None
    assert columns_of_terminal(lambda: os.ttyname(pty)) == 123

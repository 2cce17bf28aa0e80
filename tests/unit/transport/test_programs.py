"""A program that is run inside of a process is what Python would run, and what it prints is seen on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlike.errors import UsageError
from hvlike.transport.host.main_program import find_program, run_program
from hvlike.transport.host.parents import columns_of_terminal

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


def run_here(folder: Path, arguments: list[str]) -> Outcome:
    """How a program ends in a process that has hvlike, a forked one."""
    files = [folder / f"{os.getpid()}-{name}" for name in ("stdout", "stderr")]
    process = os.fork()
    if process == 0:
        os.chdir(folder)
        sys.stdout, sys.stderr = (file.open("w") for file in files)
        sys.excepthook = sys.__excepthook__
        status = 99
        try:
            status = run_program(find_program(arguments))
        except SystemExit as end:
            status = int(str(end))
        except UsageError as error:
            sys.stderr.write(f"not found: {error}")
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    stdout, stderr = (file.read_text() for file in files)
    return status, stdout, stderr


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_it_is_what_python_runs(folder: Path, arguments: list[str]) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert run_here(folder, arguments) == (done.returncode, done.stdout, done.stderr)


def test_a_program_that_does_not_compile_is_shown(folder: Path) -> None:
    status, _, said = run_here(folder, ["wrong.py"])
    assert status == 1
    assert said.endswith("SyntaxError: invalid syntax\n")


@pytest.mark.parametrize(("arguments", "text"), MISSING)
def test_what_is_not_there_is_said_in_one_line(folder: Path, arguments: list[str], text: str) -> None:
    assert run_here(folder, arguments) == (99, "", f"not found: {text.format(folder=folder)}")


@pytest.fixture
def pty() -> Iterator[int]:
    """The file descriptor of a terminal of 123 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
    yield theirs
    os.close(theirs)
    os.close(ours)


def seen_by_child_of(name: str, stderr: int) -> int | None:
    """The columns that a child of a process of this name sees, whose own stderr is a pipe."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        Path("/proc/self/comm").write_text(name)
        os.dup2(stderr, 2)
        if os.fork() == 0:
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w")
            os.write(writer, json.dumps(columns_of_terminal()).encode())
            os._exit(0)
        os.wait()
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as said:
        columns: int | None = json.loads(said.read())
    return columns


def test_the_launchers_terminal_is_found(pty: int) -> None:
    assert seen_by_child_of("mpirun", pty) == 123
    assert seen_by_child_of("nohup", pty) is None
    with open(os.devnull, "w") as nobody:
        assert seen_by_child_of("prterun", nobody.fileno()) is None


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


class Hostile:
    def __getattr__(self, name: str) -> object:
        raise ValueError(name)


@pytest.mark.parametrize("kind", [object, Hostile])
def test_a_stream_of_the_programs_own_is_no_terminal_but_the_launchers_may_be_one(
    kind: type[object], pty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", kind())
    assert columns_of_terminal(lambda: None) is None
    assert columns_of_terminal(lambda: os.ttyname(pty)) == 123

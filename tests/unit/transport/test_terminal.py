"""What rank 0 prints is seen by a person where the launcher's own stderr is a terminal, whatever ranks are given."""

import fcntl
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

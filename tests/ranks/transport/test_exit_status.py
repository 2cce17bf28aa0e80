"""The status of sys.exit is known to exit handlers, and nobody else notices how."""

import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlike.transport.failure import exit_status
from hvlike.transport.failure.exit_status import ExitObserver, to_status

# The module alone, without the package around it, so that each program starts in milliseconds.
PREAMBLE = f"""
import atexit, sys, threading
sys.path.insert(0, {str(Path(exit_status.__file__).parent)!r})
import exit_status
observer = exit_status.ExitObserver(lambda status: print("asked", status))
observer.install()
atexit.register(lambda: print("recorded", observer.status))
def caught(*args):
    try:
        sys.exit(*args)
    except SystemExit as error:
        return error
"""

# program, its status, its stdout, its stderr
ENDINGS = [
    ("pass", 0, "recorded None", ""),
    ("sys.exit()", 0, "asked 0|recorded 0", ""),
    ("sys.exit(None)", 0, "asked 0|recorded 0", ""),
    ("sys.exit(0)", 0, "asked 0|recorded 0", ""),
    ("sys.exit(7)", 7, "asked 7|recorded 7", ""),
    ("sys.exit(-1)", 255, "asked 255|recorded 255", ""),
    ("sys.exit(256)", 0, "asked 0|recorded 0", ""),
    ("sys.exit(True)", 1, "asked 1|recorded 1", ""),
    ("sys.exit('a text')", 1, "asked 1|recorded 1", "a text"),
    ("sys.exit((1, 2))", 1, "asked 1|recorded 1", "(1, 2)"),
    ("try:\n  1 / 0\nexcept ZeroDivisionError:\n  sys.exit(3)", 3, "asked 3|recorded 3", ""),
    ("try:\n  sys.exit(3)\nfinally:\n  print('finally')", 3, "finally|asked 3|recorded 3", ""),
    ("caught(3).code", 0, "recorded None", ""),
    ("raise caught(3)", 3, "asked 3|recorded 3", ""),
    ("error = caught(3); error.code = 9; raise error", 9, "asked 9|recorded 9", ""),
    ("caught(3); sys.exit(4)", 4, "asked 4|recorded 4", ""),
    ("observer.uninstall(); sys.exit(5)", 5, "recorded None", ""),
    # The three that are not seen, as the module says.
    ("raise SystemExit(3)", 3, "recorded None", ""),
    ("exit(3)", 3, "recorded None", ""),
    ("sys.exit(SystemExit(3))", 3, "recorded None", ""),
    ("t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0, "recorded None", ""),
]


@pytest.mark.job
@pytest.mark.parametrize(("program", "status", "stdout", "stderr"), ENDINGS)
def test_endings(program: str, status: int, stdout: str, stderr: str) -> None:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stdout.splitlines() == stdout.split("|")
    assert done.stderr.strip() == stderr


@pytest.mark.job
@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_and_a_module(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "program.py").write_text(PREAMBLE + "sys.exit(7)")
    command = [sys.executable, *(["-m", "program"] if as_module else ["program.py"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (7, ["asked 7", "recorded 7"])


@pytest.fixture(autouse=True)
def untouched_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own sys.exit, also where hvlike runs already and has replaced it."""
    monkeypatch.setattr(sys, "exit", inspect.unwrap(sys.exit))


@pytest.fixture
def observer(untouched_exit: None) -> Iterator[ExitObserver]:
    observer = ExitObserver()
    observer.install()
    yield observer
    observer.uninstall()


def test_the_exception_looks_like_any_other(observer: ExitObserver) -> None:
    with pytest.raises(SystemExit) as caught:
        sys.exit("why")
    error = caught.value
    assert (repr(error), str(error), error.args, error.code) == ("SystemExit('why')", "why", ("why",), "why")
    assert f"{type(error).__module__}.{type(error).__qualname__}" == "builtins.SystemExit"
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is SystemExit
        assert twin.code == "why"
    assert observer.status is None


def test_wrong_arguments_are_refused_as_before(observer: ExitObserver) -> None:
    with pytest.raises(TypeError, match="argument"):
        sys.exit(1, 2)  # type: ignore[call-arg]


def test_another_thread_gets_the_plain_exception(observer: ExitObserver) -> None:
    kinds = []

    def end() -> None:
        try:
            sys.exit(3)
        except SystemExit as error:
            kinds.append(type(error))

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert kinds == [SystemExit]


def test_sys_exit_comes_back() -> None:
    before = sys.exit
    observer = ExitObserver()
    observer.install()
    observer.install()
    assert sys.exit is not before
    assert sys.exit.__name__ == "exit"
    assert sys.exit.__doc__ == before.__doc__
    observer.uninstall()
    observer.uninstall()
    assert sys.exit is before


def test_a_replacement_by_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(status: object = None) -> None: ...

    monkeypatch.setattr(sys, "exit", theirs)
    observer = ExitObserver()
    observer.install()
    assert sys.exit is theirs
    observer.uninstall()
    assert sys.exit is theirs


def test_statuses() -> None:
    codes = [None, 0, 1, 255, 256, -1, True, False, "text", "", 1.5, (0,)]
    assert [to_status(code) for code in codes] == [0, 0, 1, 255, 0, 255, 1, 0, 1, 1, 1, 1]

"""The status of sys.exit is known to exit handlers, and nobody else notices how."""

import copy
import inspect
import pickle
import sys
import threading
from collections.abc import Iterator

import pytest

from hvlike.transport.failure.exit_status import ExitObserver, to_status


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

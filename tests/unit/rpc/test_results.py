"""What comes back of a call: an exception as the caller sees it, the names of functions, the future that brings it."""

import gc
import io
import pickle
import sys
import threading
import warnings
import weakref
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvlike.errors import NotInitializedError, UsageError
from hvlike.rpc.agent.futures import Promise
from hvlike.rpc.wire.message import Description, WorkerInfo, describe_error, function_name, rebuild_error, unescaped

WORKER = WorkerInfo("worker1", 1)


class Custom(Exception):
    """Can be made of one text."""


class Narrow(ValueError):
    """A subclass of a class that callers see."""


class TwoTexts(Exception):
    """Cannot be made of one text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


class Rebel(ValueError):
    """Fails whenever it is looked at."""

    def __repr__(self) -> str:
        raise OSError("no repr")

    def __str__(self) -> str:
        raise OSError("no str")


def described(error: BaseException) -> Description:
    """What arrives at the caller."""
    try:
        raise error
    except BaseException as caught:
        description = pickle.loads(pickle.dumps(describe_error(caught, WORKER), protocol=5))
    assert isinstance(description, Description)
    return description


def taken_for_escapes(text: str) -> str:
    with warnings.catch_warnings():
        # A backslash before a letter that means nothing stays one, with a warning.
        warnings.simplefilter("ignore", DeprecationWarning)
        return text.encode("utf-8").decode("unicode_escape")


def test_text_names_the_worker_and_holds_the_exception_and_its_traceback() -> None:
    text = str(rebuild_error(described(Custom("reason"))))
    assert text.startswith("Custom: On WorkerInfo(id=1, name=worker1):\nCustom('reason')\nTraceback (most recent")
    assert "raise error" in text
    assert text.endswith("Custom: reason\n")


@pytest.mark.parametrize(
    ("error", "kept", "original"),
    [
        (ValueError("v"), ValueError, ValueError),
        (TypeError("t"), TypeError, TypeError),
        (Narrow("n"), ValueError, Narrow),
        (UsageError("u"), ValueError, UsageError),
        (AttributeError("a"), RuntimeError, AttributeError),
        (KeyError("k"), RuntimeError, KeyError),
        (StopIteration("s"), RuntimeError, StopIteration),
        (Custom("c"), RuntimeError, Custom),
        (RuntimeError("r"), RuntimeError, RuntimeError),
        (NotInitializedError("both a RuntimeError and a ValueError"), RuntimeError, NotInitializedError),
        # What ends a program does not travel as such.
        (SystemExit(3), RuntimeError, RuntimeError),
        (KeyboardInterrupt(), RuntimeError, RuntimeError),
    ],
)
def test_callers_see_three_classes_or_the_original_one_where_it_is_asked_for(
    error: BaseException, kept: type[Exception], original: type[Exception]
) -> None:
    usual, asked_for = rebuild_error(described(error)), rebuild_error(described(error), original=True)
    assert (type(usual), type(asked_for)) == (kept, original)
    assert str(usual).startswith(f"{type(error).__name__}: On WorkerInfo(id=1, name=worker1):\n")
    if original is not RuntimeError:
        assert asked_for.args[0].startswith("On WorkerInfo(id=1, name=worker1):\n")


@pytest.mark.parametrize("original", [False, True])
def test_class_that_cannot_be_made_of_a_text_comes_as_a_runtime_error(original: bool) -> None:
    for error in (TwoTexts("a", "b"), UnicodeDecodeError("utf-8", b"x", 0, 1, "why")):
        rebuilt = rebuild_error(described(error), original=original)
        assert type(rebuilt) is RuntimeError
        assert "Original exception on remote side was On WorkerInfo(id=1, name=worker1):" in str(rebuilt)
        assert type(error).__name__ in str(rebuilt)


def test_class_that_the_caller_does_not_have_comes_as_its_family() -> None:
    class Local(ValueError):
        pass

    for description in (described(Local("l")), described(Narrow("n"))._replace(module="no.such.module")):
        rebuilt = rebuild_error(description, original=True)
        assert type(rebuilt) is ValueError
        assert str(rebuilt).startswith(f"{description.name}: On WorkerInfo")


def test_exception_that_fails_when_it_is_looked_at() -> None:
    rebuilt = rebuild_error(described(Rebel("x")))
    assert type(rebuilt) is ValueError
    assert "whose repr() raises OSError" in str(rebuilt)


def test_line_ends_are_real() -> None:
    text = str(rebuild_error(described(ValueError("first\nsecond line\n third"))))
    assert "ValueError('first\nsecond line\n third')" in text
    assert text == taken_for_escapes(text)


def test_escapes_in_source_lines_of_the_traceback_are_resolved_too() -> None:
    def fail() -> NoReturn:
        raise ValueError("a\tb\\n 'c' \"d\" \x1b \\d")

    with pytest.raises(ValueError) as caught:
        fail()
    text = str(rebuild_error(describe_error(caught.value, WORKER)))
    assert text == taken_for_escapes(text)
    assert "\\d" in text


@given(st.text(st.characters(min_codepoint=1, max_codepoint=127, exclude_characters="\\")))
def test_quoted_text_of_ascii_characters_is_resolved_for_good(text: str) -> None:
    for quoted in (repr(text), repr(repr(text)), text):
        resolved = unescaped(quoted)
        assert resolved == taken_for_escapes(resolved)
        assert text in resolved


@given(st.text())
def test_text_stays_what_it_is_without_backslashes(text: str) -> None:
    plain = text.replace("\\", "").replace("\0", "")
    assert unescaped(plain) == plain.encode("utf-8", "replace").decode("utf-8")


def test_nul_stays_an_escape() -> None:
    assert "\\x00 and more" in str(rebuild_error(described(Custom("\0 and more"))))
    assert "\0" not in str(rebuild_error(described(Custom("\0 and more"))))


def test_traceback_is_printed_to_what_stderr_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        replaced = io.StringIO()
        monkeypatch.setattr(sys, "stderr", replaced)
        described(Custom("seen\nhere"))
        printed = replaced.getvalue()
        assert printed.startswith("On WorkerInfo(id=1, name=worker1):\nCustom('seen\\nhere')\nTraceback")


class Broken(io.StringIO):
    """A stderr that cannot be written to."""

    def write(self, text: str) -> int:
        raise OSError("disk full")


@pytest.mark.parametrize("stderr", [None, Broken()])
def test_where_stderr_cannot_be_used_pythons_own_gets_the_traceback(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "__stderr__", real)
    assert "Custom('x')" in described(Custom("x")).text
    assert real.getvalue().count("Custom('x')") == 1


class Scale:
    """Can be called, and has a method."""

    def __call__(self, value: float) -> float:
        return 2 * value

    def half(self, value: float) -> float:
        return value / 2


NAMES: dict[str, Any] = {
    "aten::mul": torch.mul,
    "aten::linalg_norm": torch.linalg.norm,
    "min": min,
    "Scale": Scale,
    "Scale.half": Scale().half,
    "function_name": function_name,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_function_has_the_name_that_people_know(name: str) -> None:
    assert function_name(NAMES[name]) == name


@pytest.mark.parametrize("name", ["Scale", "partial"])
def test_what_has_no_name_is_called_by_its_class(name: str) -> None:
    assert function_name({"Scale": Scale(), "partial": partial(min, 1)}[name]) == name


class Value:
    """Something that can be watched."""


class Picky(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def test_the_future_is_torchs_and_gives_the_very_value() -> None:
    promise, value = Promise(), Value()
    assert isinstance(promise.future, torch._C.Future)
    assert not promise.future.done()
    promise.set_result(value)
    assert promise.future.done()
    assert promise.future.wait() is value
    assert promise.future.value() is value


@pytest.mark.parametrize("kept", [ValueError("v"), TypeError("t"), UsageError("u"), AttributeError("a")])
def test_errors_that_are_no_runtime_errors_keep_their_class(kept: Exception) -> None:
    promise = Promise()
    promise.set_error(kept)
    for read in (promise.future.wait, promise.future.value, promise.future.wait):
        with pytest.raises(type(kept)) as caught:
            read()
        assert str(caught.value) == str(kept)
        assert caught.value is not kept


def test_an_error_that_cannot_be_made_anew_becomes_a_runtime_error() -> None:
    promise = Promise()
    promise.set_error(Picky("one", "two"))
    with pytest.raises(RuntimeError, match="Picky: one"):
        promise.future.wait()


def test_wait_all_leaves_at_a_runtime_error_while_others_are_open() -> None:
    first, second = Promise(), Promise()
    timer = threading.Timer(0.05, second.set_error, (RuntimeError("KeyError: On ключ"),))
    timer.start()
    with pytest.raises(RuntimeError, match="KeyError: On ключ"):
        torch.futures.wait_all([first.future, second.future])
    assert not first.future.done()
    first.set_result(1)
    timer.join()


def test_callbacks_run_in_the_thread_that_completes_it_and_can_be_chained() -> None:
    promise, threads = Promise(), []
    future = promise.future
    for _ in range(20):
        future = future.then(lambda before: before.wait() + 1)
    promise.future.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    thread = threading.Thread(target=promise.set_result, args=(0,), name="completing")
    thread.start()
    assert future.wait() == 20
    thread.join()
    assert threads == ["completing"]


@pytest.mark.parametrize("error", [ValueError("the reason"), RuntimeError("the reason")])
def test_callbacks_get_the_error(error: Exception) -> None:
    promise = Promise()
    chained = promise.future.then(lambda future: future.wait())
    promise.set_error(error)
    with pytest.raises(RuntimeError, match="the reason"):
        chained.wait()


def test_a_program_may_complete_it_before_the_reply() -> None:
    for error in (None, ValueError("late"), RuntimeError("late")):
        promise = Promise()
        promise.future.set_result(1)
        if error is None:
            promise.set_result(2)
        else:
            promise.set_error(error)
        assert promise.future.wait() == 1


def test_nothing_outlives_its_future() -> None:
    promise, value = Promise(), Value()
    watched = weakref.ref(value)
    promise.set_result(value)
    del value
    assert watched() is not None
    gc.disable()
    try:
        del promise
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_that_was_raised_beside_its_promise_does_not_keep_it(error: type[Exception]) -> None:
    def fail(watched: Value) -> "weakref.ref[Value]":
        promise = Promise()
        try:
            raise error("x")
        except (ValueError, RuntimeError) as caught:
            raised = caught
        promise.set_error(raised)
        return weakref.ref(watched)

    reference = fail(Value())
    gc.collect()
    assert reference() is None


def test_waiting_for_an_error_keeps_no_frame_alive() -> None:
    promise = Promise()
    promise.set_error(ValueError("x"))

    def wait_for(watched: Value) -> "weakref.ref[Value]":
        with pytest.raises(ValueError):
            promise.future.wait()
        return weakref.ref(watched)

    reference = wait_for(Value())
    gc.collect()
    assert reference() is None

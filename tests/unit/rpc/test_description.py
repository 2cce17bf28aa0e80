"""How an exception and a function are described for the caller, and what is built from the description."""

import io
import pickle
import sys
import warnings
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvlike.errors import NotInitializedError, UsageError
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

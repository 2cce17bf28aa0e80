"""A question is answered, or it is said why not: whatever happens to who was asked, nobody waits for ever."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hvlike.doctor.probe import Gap, Prober


def hang() -> int:
    time.sleep(3600)
    return 1


def exit_early() -> int:
    os._exit(3)


def crash() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def speak_and_crash() -> int:
    print("on stdout")
    print("on stderr", file=sys.stderr)
    return crash()


def fail() -> int:
    raise ValueError("not today")


def end_quietly() -> int:
    sys.exit(0)


NO_ANSWER: list[tuple[Callable[[], int], str, int | None]] = [
    (exit_early, "ended the process with status 3", 3),
    (crash, "crashed with SIGKILL", -9),
    (fail, "failed: ValueError: not today", None),
    (end_quietly, "failed: SystemExit: 0", None),
]


def test_an_answer_comes_back_from_another_process() -> None:
    answer = Prober().ask(lambda: (os.getpid(), {"any": [1, None]}))
    assert not isinstance(answer, Gap)
    assert answer[0] != os.getpid()
    assert answer[1] == {"any": [1, None]}


@pytest.mark.parametrize(("question", "reason", "status"), NO_ANSWER)
def test_how_it_ended_is_told(question: Callable[[], int], reason: str, status: int | None) -> None:
    answer = Prober().ask(question)
    assert isinstance(answer, Gap)
    assert (answer.reason, answer.status) == (reason, status)


def test_a_question_that_blocks_is_given_up() -> None:
    answer = Prober(limit=0.1).ask(hang)
    assert answer == Gap("was given up after 0.1 s without an answer")


def test_what_was_printed_before_a_failure_is_kept_and_goes_nowhere_else(capfd: pytest.CaptureFixture[str]) -> None:
    failed, crashed = Prober().ask(fail), Prober().ask(speak_and_crash)
    assert isinstance(failed, Gap)
    assert isinstance(crashed, Gap)
    assert failed.output[-1] == "ValueError: not today"
    assert crashed.output == ("on stdout", "on stderr")
    assert capfd.readouterr() == ("", "")


def test_what_was_found_before_the_end_is_kept() -> None:
    def stages() -> Iterator[str]:
        yield "first"
        yield "second"
        exit_early()

    records, gap = Prober().follow(stages)
    assert records == ("first", "second")
    assert gap is not None
    assert gap.status == 3
    assert Prober().follow(lambda: iter("ab")) == (("a", "b"), None)


def test_large_answers_arrive() -> None:
    assert Prober().ask(lambda: b"x" * (1 << 20)) == b"x" * (1 << 20)


@pytest.mark.parametrize("then", [lambda: None, hang, crash, fail])
def test_no_child_is_left(then: Callable[[], object]) -> None:
    def stages() -> Iterator[int]:
        yield os.getpid()
        then()

    # The first answer may take its time on a busy machine; the second never comes.
    (child,), _ = Prober(limit=5).follow(stages)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_after_the_launcher_has_asked_to_end_nothing_more_is_tried() -> None:
    prober = Prober()
    prober.interrupted = True
    answer = prober.ask(lambda: 1)
    assert isinstance(answer, Gap)
    assert "the launcher" in answer.reason

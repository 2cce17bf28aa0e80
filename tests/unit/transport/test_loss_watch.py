"""MPI is told of processes of this node that are gone; where it cannot be told, the job ends."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from hvlike.transport.failure import loss_watch
from hvlike.transport.failure.loss_watch import LossWatch


class Told:
    """What MPI is told, and whether it listens."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.listens = True
        self.given_up = threading.Event()
        self.said = threading.Event()

    def report(self, ranks: list[int]) -> bool:
        self.lost += ranks
        self.said.set()
        return self.listens

    def give_up(self, text: str, summary: str) -> None:
        self.given_up.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()
    monkeypatch.setattr(loss_watch, "report_lost", found.report)
    # The one of this process, if it has one, goes on.
    monkeypatch.setattr(loss_watch.WATCHING, "watch", None)
    return found


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("listens", [True, False])
def test_a_process_that_is_gone_is_told_once(listens: bool, told: Told, child: subprocess.Popen[str]) -> None:
    told.listens = listens
    watch = LossWatch({3: (child.pid, "1")}, told.give_up)
    assert told.lost == []
    child.kill()
    child.wait()
    assert told.said.wait(60)
    assert listens or told.given_up.wait(60)
    watch.stop()
    assert told.lost == [3]
    assert told.given_up.is_set() == (not listens)


def test_who_ends_after_it_was_stopped_is_not_lost(told: Told, child: subprocess.Popen[str]) -> None:
    watch = LossWatch({3: (child.pid, None)}, told.give_up)
    watch.stop()
    child.kill()
    child.wait()
    assert not told.said.wait(3 * loss_watch.LOOK_SECONDS)


def test_a_new_watch_takes_the_place_of_the_last(told: Told, child: subprocess.Popen[str]) -> None:
    LossWatch({3: (child.pid, None)}, told.give_up)
    second = LossWatch({5: (child.pid, None)}, told.give_up)
    child.kill()
    child.wait()
    assert told.said.wait(60)
    second.stop()
    assert told.lost == [5]

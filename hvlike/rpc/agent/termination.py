"""When is a session over? Not when all workers have called shutdown: a call in flight may start another one.

Every worker counts the messages that it has sent and received. When it has nothing to do, it reports its counts to the
coordinator, the lowest present rank, and again after every result. If two waves of reports in a row have the same
totals, and as many messages were received as sent, then no message was in flight in between and no idle worker can have
been woken: the session is over. Workers that have left without waiting are not counted.

Nothing here waits: the protocol reacts to messages, and to the worker becoming idle, so a worker in shutdown serves as
fast as ever.

Source: F. Mattern, Algorithms for distributed termination detection, 1987 (the four-counter method).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol


class Report(NamedTuple):
    """The counts of an idle worker."""

    sent: int
    received: int
    present: frozenset[int]
    """The workers it counts: those that it has not seen leave."""


class Wave(NamedTuple):
    """Which reports belong together."""

    phase: str
    number: int
    coordinator: int


class Worker(Protocol):
    """What the detection needs from its worker."""

    rank: int

    @property
    def is_idle(self) -> bool:
        """True if this worker waits for nothing and serves nothing."""

    @property
    def present(self) -> set[int]:
        """The workers that are not known to be gone."""

    def counts(self, ranks: Collection[int]) -> tuple[int, int]:
        """Return how many messages were sent to `ranks`, and received from them."""

    def send_report(self, rank: int, wave: Wave, report: Report) -> None:
        """Call `hear_report` on the worker `rank`."""

    def send_result(self, rank: int, wave: Wave, over: bool) -> None:
        """Call `hear_result` on the worker `rank`."""

    def later(self, check: Callable[[], None], waves: int) -> None:
        """Call `check` after a pause; `waves` is how many have failed so far."""


class Termination:
    """The detection on one worker. All methods run in the loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wave: Wave | None = None
        self._ended: Callable[[], None] | None = None
        self._before: tuple[int, int] | None = None
        self._reported = False
        self._reports: dict[Wave, dict[int, Report]] = {}

    def begin(self, phase: str, ended: Callable[[], None]) -> None:
        """This worker has come to the end of `phase`; calls `ended` when all have and the session is quiet."""
        self._ended = ended
        self._begin_wave(Wave(phase, 0, min(self._worker.present)))
        self.check()

    def check(self) -> None:
        """Go on if possible: this worker may have become idle, or another one may have left."""
        if self._wave is None:
            return
        worker = self._worker
        present = worker.present
        if min(present) != self._wave.coordinator:
            # The coordinator is gone; the next one begins anew.
            self._begin_wave(Wave(self._wave.phase, 0, min(present)))
        if not self._reported and worker.is_idle:
            self._reported = True
            report = Report(*worker.counts(present), frozenset(present))
            if worker.rank == self._wave.coordinator:
                self._reports.setdefault(self._wave, {})[worker.rank] = report
            else:
                worker.send_report(self._wave.coordinator, self._wave, report)
        reports = self._reports.get(self._wave, {})
        if worker.rank == self._wave.coordinator and present <= reports.keys():
            self._judge(self._wave, [reports[rank] for rank in sorted(present)])

    def hear_report(self, source: int, wave: Wave, report: Report) -> None:
        """Another worker has reported, perhaps before this one has come so far."""
        self._reports.setdefault(wave, {})[source] = report
        self.check()

    def hear_result(self, wave: Wave, over: bool) -> None:
        """The coordinator has judged a wave."""
        if wave != self._wave:
            return
        if over:
            self._wave, ended = None, self._ended
            if ended is not None:
                ended()
        else:
            before = self._before
            self._begin_wave(wave._replace(number=wave.number + 1))
            self._before = before
            self._worker.later(self.check, wave.number)

    def _judge(self, wave: Wave, reports: list[Report]) -> None:
        now = totals(reports)
        over = is_quiet(self._before, now)
        self._before = now
        del self._reports[wave]
        for rank in self._worker.present - {self._worker.rank}:
            self._worker.send_result(rank, wave, over)
        self.hear_result(wave, over)

    def _begin_wave(self, wave: Wave) -> None:
        self._wave = wave
        self._before = None
        self._reported = False


def totals(reports: list[Report]) -> tuple[int, int] | None:
    """Return the messages sent and received in all; None if the workers differ about who is present."""
    if any(report.present != reports[0].present for report in reports):
        return None
    return sum(report.sent for report in reports), sum(report.received for report in reports)


def is_quiet(before: tuple[int, int] | None, now: tuple[int, int] | None) -> bool:
    """True if two waves with these totals prove that no message is in flight."""
    return now is not None and before == now and now[0] == now[1]

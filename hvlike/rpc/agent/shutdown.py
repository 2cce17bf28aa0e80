"""The end of a session on one worker: is it over, who has left, and who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hvlike.errors import WorkerLostError
from hvlike.rpc.wire.message import IDLE_REPORT, LEAVING, STATUS, STATUS_QUERY, WAVE_RESULT, describe_subject
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Wait, pause
from hvlike.transport.messages.traffic import Topic

if TYPE_CHECKING:
    from hvlike.rpc.agent.agent import Agent

WORK, REFERENCES, KNOWN = PHASES = "work", "references", "known"
"""What a graceful shutdown waits for, in this order. KNOWN: that all know of the end, under fault tolerance only: who
has gone on may revoke its communicators, which takes away what others have not received.
"""

_MOST_SHOWN = 5
_SHORTEST_PAUSE_SECONDS = 1e-3
_LONGEST_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class WorkerStatus:
    has_begun: bool  # It has called shutdown
    serving: tuple[tuple[int, str, float], ...]
    """The oldest requests that it has not answered: caller's rank, function, seconds since it arrived."""
    serving_in_all: int
    waiting: tuple[tuple[int, int], ...]  # Its own calls without a reply: rank of the callee, how many


def worker_status(agent: Agent) -> WorkerStatus:
    now = system.monotonic()
    requests = sorted(agent.open.values(), key=lambda request: request.came)
    return WorkerStatus(
        has_begun=agent.shutdown.begun,
        serving=tuple((each.source, describe_subject(each.about), now - each.came) for each in requests[:_MOST_SHOWN]),
        serving_in_all=len(requests),
        waiting=tuple(sorted(agent.pending.ranks().items())),
    )


def status_report(names: dict[int, str], statuses: dict[int, WorkerStatus]) -> str:
    """Say who keeps a shutdown from ending, and why. names: of all workers. statuses: of those that have replied."""
    parts = []
    for rank, name in names.items():
        status = statuses.get(rank)
        who = f"{name} (rank {rank})"
        if status is None:
            parts.append(f"{who} does not answer")
            continue
        if not status.has_begun:
            parts.append(f"{who} has not called shutdown")
        for source, about, seconds in status.serving:
            parts.append(f"{who} has served {about or 'a call'} of {names.get(source, source)} for {seconds:.1f} s")
        if status.serving_in_all > len(status.serving):
            parts.append(f"{who} has {status.serving_in_all - len(status.serving)} more calls to serve")
        for callee, calls in status.waiting:
            parts.append(f"{who} waits for {calls} answers of {names.get(callee, callee)}")
    return "; ".join(parts) or "all workers are idle and have called shutdown; they agree at this moment"


class Report(NamedTuple):
    sent: int
    received: int
    present: frozenset[int]  # The workers it counts: those that it has not seen leave


class ShutdownWave(NamedTuple):
    """Which reports belong together."""

    phase: str
    number: int
    coordinator: int


class Termination:
    """When is a session over? Not when all workers have called shutdown: a call in flight may start another one.

    Every worker counts the messages that it has sent and received. When it has nothing to do, it reports its counts to
    the coordinator, the lowest present rank, and again after every result. If two waves of reports in a row have the
    same totals, and as many messages were received as sent, then no message was in flight in between and no idle worker
    can have been woken: the session is over. Workers that have left without waiting are not counted.

    Nothing here waits: the protocol reacts to messages, and to the worker becoming idle, so a worker in shutdown serves
    as fast as ever. All methods run in the loop.

    Source: F. Mattern, Algorithms for distributed termination detection, 1987 (the four-counter method).
    """

    def __init__(
        self, worker: Agent, tell: Callable[..., None], later: Callable[[Callable[[], None], int], None]
    ) -> None:
        """tell: sends (rank, message type, ...) to `hear`. later: calls a function after a pause; gets failed waves."""
        self._worker = worker
        self._tell = tell
        self._later = later
        self._wave: ShutdownWave | None = None
        self._ended: Callable[[], None] | None = None  # None: this worker is not in its shutdown, or not now
        self._over: set[str] = set()
        self._before: tuple[int, int] | None = None
        self._reported = False
        self._reports: dict[ShutdownWave, dict[int, Report]] = {}

    def begin(self, phase: str, ended: Callable[[], None]) -> None:
        """This worker has come to the end of `phase`; calls `ended` when all have and the session is quiet. After a
        pause it goes on where it was.
        """
        self._ended = ended
        if phase in self._over:
            ended()
            return
        if self._wave is None or self._wave.phase != phase:
            self._begin_wave(ShutdownWave(phase, 0, min(self._worker.present)))
        self.check()

    def pause(self) -> None:
        """This worker's program has left its shutdown by an error: the others wait until it is there again."""
        self._ended = None

    def check(self) -> None:
        """Go on if possible: this worker may have become idle, or another one may have left."""
        if self._wave is None or self._ended is None:
            return
        worker = self._worker
        present = worker.present
        if min(present) != self._wave.coordinator:
            # The coordinator is gone; the next one begins anew.
            self._begin_wave(ShutdownWave(self._wave.phase, 0, min(present)))
        if not self._reported and worker.is_idle:
            self._reported = True
            sent, received = (sum(count[rank] for rank in present) for count in (worker.sent, worker.received))
            report = Report(sent, received, frozenset(present))
            if worker.rank == self._wave.coordinator:
                self._reports.setdefault(self._wave, {})[worker.rank] = report
            else:
                self._tell(self._wave.coordinator, IDLE_REPORT, self._wave, report)
        reports = self._reports.get(self._wave, {})
        if worker.rank == self._wave.coordinator and present <= reports.keys():
            self._judge(self._wave, [reports[rank] for rank in sorted(present)])

    def hear_report(self, source: int, wave: ShutdownWave, report: Report) -> None:
        """Another worker has reported, perhaps before this one has come so far."""
        if wave.phase in self._over:
            self._tell(source, WAVE_RESULT, wave, True)
            return
        self._reports.setdefault(wave, {})[source] = report
        if self._wave is not None and PHASES.index(wave.phase) > PHASES.index(self._wave.phase):
            # Who was to say that this one is over has been lost after it had told the other worker.
            self.hear_result(self._wave, True)
        self.check()

    def hear_result(self, wave: ShutdownWave, over: bool) -> None:
        """The coordinator has judged a wave."""
        if wave != self._wave:
            return
        if over:
            self._over.add(wave.phase)
            for late in [each for each in self._reports if each.phase == wave.phase]:
                # They have not been told: the coordinator was lost, and they have taken this worker for the next one.
                for rank in self._reports.pop(late).keys() - {self._worker.rank}:
                    self._tell(rank, WAVE_RESULT, late, True)
            self._wave, ended = None, self._ended
            if ended is not None:
                ended()
        else:
            before = self._before
            self._begin_wave(wave._replace(number=wave.number + 1))
            self._before = before
            self._later(self.check, wave.number)

    def _judge(self, wave: ShutdownWave, reports: list[Report]) -> None:
        now = totals(reports)
        over = is_quiet(self._before, now)
        self._before = now
        del self._reports[wave]
        for rank in self._worker.present - {self._worker.rank}:
            self._tell(rank, WAVE_RESULT, wave, over)
        self.hear_result(wave, over)

    def _begin_wave(self, wave: ShutdownWave) -> None:
        self._wave = wave
        self._before = None
        self._reported = False


def totals(reports: list[Report]) -> tuple[int, int] | None:
    if any(report.present != reports[0].present for report in reports):
        return None
    return sum(report.sent for report in reports), sum(report.received for report in reports)


def is_quiet(before: tuple[int, int] | None, now: tuple[int, int] | None) -> bool:
    """True if two waves with these totals prove that no message is in flight."""
    return now is not None and before == now and now[0] == now[1]


class SessionShutdown:
    """This worker's part in the end of a session. Its messages are not counted among those of calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._termination = Termination(agent, self._tell, self._later)
        self.begun = False  # True while this worker's program is in a graceful shutdown
        self._woken = system.Event()
        self._vanished: set[int] | None = None  # Workers that had when the phase was over; None before
        self._asked_by: set[int] = set()
        self._statuses: dict[int, WorkerStatus] = {}

    def begin(self, phase: str) -> None:
        """This worker has come to the end of `phase`."""

        def over() -> None:
            self._vanished = set(self._agent.vanished)
            self._woken.set()

        def begin() -> None:
            self._termination.begin(phase, over)
            self.lose()

        self.begun, self._vanished = True, None
        self._woken.clear()
        self._agent.fabric.loop.perform(begin)

    def wait(self, seconds: float) -> bool:
        """Whether all have come to the end of the phase and no message is in flight. Raises: WorkerLostError for
        workers that have vanished, once; the shutdown may be begun again.
        """
        self._woken.wait(seconds)
        self._woken.clear()
        agent = self._agent
        # Who has vanished since may only have left hvlike; the next phase needs it, if there is one.
        vanished = agent.vanished if self._vanished is None else self._vanished
        untold = sorted(vanished - agent.told)
        if untold:
            agent.told.update(untold)
            self.begun = False
            agent.fabric.loop.perform(self._termination.pause)
            reasons = " ".join(agent.lost[rank] for rank in untold)
            raise WorkerLostError(
                f"shutdown() of RPC on {agent.me.name} (rank {agent.rank}): {reasons} Call shutdown() again to wait "
                "for the other workers, or shutdown(graceful=False).",
                untold,
            )
        return self._vanished is not None

    def lose(self) -> None:
        """Some workers may be gone. In the loop."""
        agent = self._agent
        if self.begun and agent.lost:
            if agent.vanished - agent.told:
                self._woken.set()
            # Who has ended the session already says so.
            self._tell_others(STATUS_QUERY)
        self.check()

    def check(self) -> None:
        if self.begun:
            self._termination.check()

    def report(self, seconds: float) -> str:
        """Ask all other workers for their status, and say who keeps the shutdown from ending. Blocks."""
        agent, loop = self._agent, self._agent.fabric.loop

        def ask() -> None:
            self._statuses.clear()
            self._tell_others(STATUS_QUERY)

        loop.perform(ask)
        # A worker that leaves meanwhile does not answer.
        loop.wait(lambda: agent.present <= {agent.rank, *self._statuses}, seconds)
        names = {rank: agent.workers[rank].name for rank in sorted(agent.present)}
        return status_report(names, {**self._statuses, agent.rank: worker_status(agent)})

    def leave(self, *, unexpected: bool) -> None:
        """The session ends here. unexpected: All are to hear of it, not only who has asked since a worker is lost."""
        for rank in self._agent.present.difference([self._agent.rank]) if unexpected else self._asked_by:
            self._tell(rank, LEAVING)

    def receive(self, source: int, what: int, rest: list[Any]) -> None:
        if what == STATUS_QUERY:
            self._asked_by.add(source)
            self._tell(source, STATUS, worker_status(self._agent))
        elif what == STATUS:
            self._statuses[source] = rest[0]
        elif what == IDLE_REPORT:
            self._termination.hear_report(source, *rest)
        elif what == WAVE_RESULT:
            self._termination.hear_result(*rest)
        elif source not in self._agent.lost:
            name = self._agent.workers[source].name
            self._agent.lose({source: f"RPC has been shut down on {name} (rank {source})."})

    def _tell(self, rank: int, what: int, *rest: Any) -> None:
        self._agent.fabric.channel.send(rank, Topic.RPC, (self._agent.session, what, *rest), [], kind="rpc")

    def _tell_others(self, what: int) -> None:
        for rank in self._agent.present - {self._agent.rank}:
            self._tell(rank, what)

    def _later(self, check: Callable[[], None], waves: int) -> None:
        seconds = min(_SHORTEST_PAUSE_SECONDS * 2.0 ** min(waves, 10), _LONGEST_PAUSE_SECONDS)
        self._agent.fabric.loop.start(pause(seconds, Wait.POLL), lambda _: check(), wake=False)

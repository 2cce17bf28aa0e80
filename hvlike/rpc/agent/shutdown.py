"""The end of a session on one worker: is it idle, who has left, and who keeps the others waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvlike.rpc.agent.routing import IDLE_REPORT, LEAVING, STATUS, STATUS_QUERY, WAVE_RESULT, SessionRouter
from hvlike.rpc.agent.termination import Report, Termination, Wave
from hvlike.rpc.wire.reducers import describe_subject
from hvlike.transport.loop.coroutine import Coroutine, Wait

if TYPE_CHECKING:
    from hvlike.rpc.agent.agent import Agent

_MOST_SHOWN = 5
_SHORTEST_PAUSE_SECONDS = 1e-3
_LONGEST_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class WorkerStatus:
    """What keeps a worker busy."""

    has_begun: bool
    """It has called shutdown."""
    serving: tuple[tuple[int, str, float], ...]
    """The oldest requests that it has not answered: caller's rank, function, seconds since it arrived."""
    serving_in_all: int
    waiting: tuple[tuple[int, int], ...]
    """Its own calls without a reply: rank of the callee, how many."""


def worker_status(agent: Agent) -> WorkerStatus:
    """Return the status of this worker now."""
    now = time.monotonic()
    requests = sorted(agent.open.values(), key=lambda request: request.came)
    return WorkerStatus(
        has_begun=agent.shutdown.begun,
        serving=tuple((each.source, describe_subject(each.about), now - each.came) for each in requests[:_MOST_SHOWN]),
        serving_in_all=len(requests),
        waiting=tuple(sorted(agent.pending.ranks().items())),
    )


def status_report(names: dict[int, str], statuses: dict[int, WorkerStatus]) -> str:
    """Say who keeps a shutdown from ending, and why.

    Args:
        names: Of all workers, by rank.
        statuses: Of those that have replied.
    """
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


class SessionShutdown:
    """This worker's part in the end of a session. Its messages are not counted among those of calls."""

    def __init__(self, agent: Agent, router: SessionRouter) -> None:
        self.rank = agent.rank
        self._agent = agent
        self._router = router
        self._termination = Termination(self)
        self.begun = False
        """True once graceful shutdown was called."""
        self.statuses: dict[int, WorkerStatus] = {}
        """The replies to `ask`."""

    def begin(self, phase: str, ended: Callable[[], None]) -> None:
        """This worker has come to the end of `phase`; calls `ended` when all have and no message is in flight."""
        self._agent.fabric.loop.perform(lambda: self._termination.begin(phase, ended))

    def check(self) -> None:
        """This worker may have become idle, or another one has left. In the loop."""
        if self.begun:
            self._termination.check()

    def ask(self) -> None:
        """Ask all other workers for their status; `statuses` fills with the replies. Does not block."""

        def send() -> None:
            self.statuses.clear()
            self._tell_others(STATUS_QUERY)

        self._agent.fabric.loop.perform(send)

    def leave(self) -> None:
        """Tell the others, which may still need this worker, that it is gone. In the loop."""
        self._tell_others(LEAVING)

    def receive(self, source: int, what: int, rest: list[Any]) -> None:
        """Handle a message about the shutdown. In the loop."""
        if what == STATUS_QUERY:
            self._tell(source, STATUS, worker_status(self._agent))
        elif what == STATUS:
            self.statuses[source] = rest[0]
        elif what == IDLE_REPORT:
            self._termination.hear_report(source, *rest)
        elif what == WAVE_RESULT:
            self._termination.hear_result(*rest)
        else:
            name = self._agent.workers[source].name
            self._agent.lose({source: f"RPC has been shut down on {name} (rank {source})."})

    def _tell(self, rank: int, what: int, *rest: Any) -> None:
        self._router.send(rank, (self._agent.session, what, *rest), [])

    def _tell_others(self, what: int) -> None:
        for rank in self.present - {self.rank}:
            self._tell(rank, what)

    # -- termination.Worker -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if this worker waits for nothing and serves nothing."""
        return self._agent.is_idle

    @property
    def present(self) -> set[int]:
        """The workers that are not known to be gone."""
        return self._agent.present

    def counts(self, ranks: Collection[int]) -> tuple[int, int]:
        """Return how many messages were sent to `ranks`, and received from them."""
        sent, received = self._agent.sent, self._agent.received
        return sum(sent[rank] for rank in ranks), sum(received[rank] for rank in ranks)

    def send_report(self, rank: int, wave: Wave, report: Report) -> None:
        """Tell the coordinator that this worker is idle."""
        self._tell(rank, IDLE_REPORT, wave, report)

    def send_result(self, rank: int, wave: Wave, over: bool) -> None:
        """Tell a worker whether the session is over."""
        self._tell(rank, WAVE_RESULT, wave, over)

    def later(self, check: Callable[[], None], waves: int) -> None:
        """Call `check` after a pause, which grows with the number of waves that have failed."""
        pause = min(_SHORTEST_PAUSE_SECONDS * 2.0 ** min(waves, 10), _LONGEST_PAUSE_SECONDS)
        self._agent.fabric.loop.start(_pause(pause), lambda _: check(), wake=False)


def _pause(seconds: float) -> Coroutine[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield Wait.POLL

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


_MOST = 5


@dataclass(frozen=True)
class WorkerStatus:
    """What keeps a worker busy."""

    parting: bool
    """It has called shutdown."""
    serving: tuple[tuple[int, str, float], ...]
    """Requests it has not answered: caller's rank, function, seconds since they came; the oldest few."""
    serving_in_all: int
    waiting: tuple[tuple[int, int], ...]
    """Calls of its own without an answer: rank of the callee, how many."""


def worker_status(agent: Agent) -> WorkerStatus:
    """The state of this worker now."""
    now = time.monotonic()
    requests = sorted(agent.open.values(), key=lambda request: request.came)
    return WorkerStatus(
        parting=agent.parting.begun,
        serving=tuple((each.source, describe_subject(each.about), now - each.came) for each in requests[:_MOST]),
        serving_in_all=len(requests),
        waiting=tuple(sorted(agent.pending.ranks().items())),
    )


def status_report(names: dict[int, str], states: dict[int, WorkerStatus]) -> str:
    """Who keeps a shutdown from ending, and by what. names: of all workers; states: of those that have answered."""
    parts = []
    for rank, name in names.items():
        state = states.get(rank)
        who = f"{name} (rank {rank})"
        if state is None:
            parts.append(f"{who} does not answer")
            continue
        if not state.parting:
            parts.append(f"{who} has not called shutdown")
        for source, about, seconds in state.serving:
            parts.append(f"{who} has served {about or 'a call'} of {names.get(source, source)} for {seconds:.1f} s")
        if state.serving_in_all > len(state.serving):
            parts.append(f"{who} has {state.serving_in_all - len(state.serving)} more calls to serve")
        for callee, calls in state.waiting:
            parts.append(f"{who} waits for {calls} answers of {names.get(callee, callee)}")
    return "; ".join(parts) or "all workers are idle and have called shutdown; they agree at this moment"


_SHORTEST_PAUSE = 1e-3
_LONGEST_PAUSE = 0.1


class SessionShutdown:
    """This worker's part. Its messages are not counted among those of calls."""

    def __init__(self, agent: Agent, switchboard: SessionRouter) -> None:
        self.rank = agent.rank
        self._agent = agent
        self._switchboard = switchboard
        self._termination = Termination(self)
        self.begun = False
        """True from the call of a graceful shutdown on."""
        self.states: dict[int, WorkerStatus] = {}
        """What the others have answered to `ask`."""

    def begin(self, phase: str, ended: Callable[[], None]) -> None:
        """This worker has come to the end of `phase`; `ended` is called when all have and nothing is in flight."""
        self._agent.fabric.loop.perform(lambda: self._termination.begin(phase, ended))

    def look(self) -> None:
        """Something has ended or somebody left: this worker may be idle now."""
        if self.begun:
            self._termination.look()

    def ask(self) -> None:
        """Ask all other workers what they are doing; `states` fills with their answers. Does not block."""

        def send() -> None:
            self.states.clear()
            self._tell_others(STATUS_QUERY)

        self._agent.fabric.loop.perform(send)

    def depart(self) -> None:
        """Tell the others, who may still need this worker, that it is gone."""
        self._tell_others(LEAVING)

    def receive(self, source: int, what: int, rest: list[Any]) -> None:
        """A message about parting."""
        if what == STATUS_QUERY:
            self._tell(source, STATUS, worker_status(self._agent))
        elif what == STATUS:
            self.states[source] = rest[0]
        elif what == IDLE_REPORT:
            self._termination.hear_report(source, *rest)
        elif what == WAVE_RESULT:
            self._termination.hear_verdict(*rest)
        else:
            name = self._agent.workers[source].name
            self._agent.lose({source: f"RPC has been shut down on {name} (rank {source})."})

    def _tell(self, rank: int, what: int, *rest: Any) -> None:
        self._switchboard.send(rank, (self._agent.session, what, *rest), [])

    def _tell_others(self, what: int) -> None:
        for rank in self.present - {self.rank}:
            self._tell(rank, what)

    # -- what the detection of the end asks for, see termination.Worker ----------------------------

    @property
    def is_idle(self) -> bool:
        """True when nothing is in flight from here and nothing is being served here."""
        return self._agent.is_idle

    @property
    def present(self) -> set[int]:
        """The workers that are not known to be gone."""
        return self._agent.present

    def counts(self, ranks: Collection[int]) -> tuple[int, int]:
        """Messages sent to `ranks` and received from them."""
        sent, received = self._agent.sent, self._agent.received
        return sum(sent[rank] for rank in ranks), sum(received[rank] for rank in ranks)

    def send_report(self, rank: int, wave: Wave, report: Report) -> None:
        """Tell the coordinator that this worker is idle."""
        self._tell(rank, IDLE_REPORT, wave, report)

    def send_verdict(self, rank: int, wave: Wave, over: bool) -> None:
        """Tell a worker whether the session is quiet."""
        self._tell(rank, WAVE_RESULT, wave, over)

    def later(self, look: Callable[[], None], waves: int) -> None:
        """Call `look` in a moment, which is longer the more waves have failed."""
        pause = min(_SHORTEST_PAUSE * 2.0 ** min(waves, 10), _LONGEST_PAUSE)
        self._agent.fabric.loop.start(_pause(pause), lambda _: look(), wake=False)


def _pause(seconds: float) -> Coroutine[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield Wait.POLL

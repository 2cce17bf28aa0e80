"""How the workers of a session part: who is idle, who has left, and who keeps the others waiting. In the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from hvlike.rpc.state import State, describe_state
from hvlike.rpc.switchboard import DEPARTURE, QUESTION, REPORT, STATE, VERDICT, Switchboard
from hvlike.rpc.termination import Report, Termination, Wave
from hvlike.transport.routine import Routine, Wait

if TYPE_CHECKING:
    from hvlike.rpc.agent import Agent

_SHORTEST_PAUSE = 1e-3
_LONGEST_PAUSE = 0.1


class Parting:
    """This worker's part. Its messages are not counted among those of calls."""

    def __init__(self, agent: Agent, switchboard: Switchboard) -> None:
        self.rank = agent.rank
        self._agent = agent
        self._switchboard = switchboard
        self._termination = Termination(self)
        self.begun = False
        """True from the call of a graceful shutdown on."""
        self.states: dict[int, State] = {}
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
            self._tell_others(QUESTION)

        self._agent.fabric.loop.perform(send)

    def depart(self) -> None:
        """Tell the others, who may still need this worker, that it is gone."""
        self._tell_others(DEPARTURE)

    def receive(self, source: int, what: int, rest: list[Any]) -> None:
        """A message about parting."""
        if what == QUESTION:
            self._tell(source, STATE, describe_state(self._agent))
        elif what == STATE:
            self.states[source] = rest[0]
        elif what == REPORT:
            self._termination.hear_report(source, *rest)
        elif what == VERDICT:
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
        self._tell(rank, REPORT, wave, report)

    def send_verdict(self, rank: int, wave: Wave, over: bool) -> None:
        """Tell a worker whether the session is quiet."""
        self._tell(rank, VERDICT, wave, over)

    def later(self, look: Callable[[], None], waves: int) -> None:
        """Call `look` in a moment, which is longer the more waves have failed."""
        pause = min(_SHORTEST_PAUSE * 2.0 ** min(waves, 10), _LONGEST_PAUSE)
        self._agent.fabric.loop.start(_pause(pause), lambda _: look(), wake=False)


def _pause(seconds: float) -> Routine[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield Wait.POLL

"""What a worker is doing, in words that can travel: for reports of a shutdown that cannot end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvlike.rpc.callables import described

if TYPE_CHECKING:
    from hvlike.rpc.agent import Agent

_MOST = 5


@dataclass(frozen=True)
class State:
    """What keeps a worker busy."""

    parting: bool
    """It has called shutdown."""
    serving: tuple[tuple[int, str, float], ...]
    """Requests it has not answered: caller's rank, function, seconds since they came; the oldest few."""
    serving_in_all: int
    waiting: tuple[tuple[int, int], ...]
    """Calls of its own without an answer: rank of the callee, how many."""


def describe_state(agent: Agent) -> State:
    """The state of this worker now."""
    now = time.monotonic()
    requests = sorted(agent.open.values(), key=lambda request: request.came)
    return State(
        parting=agent.parting.begun,
        serving=tuple((each.source, described(each.about), now - each.came) for each in requests[:_MOST]),
        serving_in_all=len(requests),
        waiting=tuple(sorted(agent.pending.ranks().items())),
    )


def in_words(names: dict[int, str], states: dict[int, State]) -> str:
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

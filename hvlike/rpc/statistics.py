"""What RPC is doing on this worker, as figures."""

from __future__ import annotations

from dataclasses import dataclass

from hvlike.rpc import rrefs
from hvlike.rpc.agent import current
from hvlike.rpc.rrefs import LiveRRef


@dataclass(frozen=True)
class Statistics:
    """Figures of one worker at one moment."""

    worker: str
    """Its name."""
    calls_in_flight: dict[str, int]
    """Calls of this worker without an answer, by the name of the worker that serves them."""
    requests_queued: int
    """Requests of others that wait for a thread."""
    requests_running: int
    """Functions that run for others now."""
    requests_open: int
    """Requests of others without an answer: queued, running, and those whose function answers later."""
    threads: int
    """Threads of RPC and of the progress loop, idle ones included."""
    messages_sent: int
    messages_received: int
    live_rrefs: tuple[LiveRRef, ...]
    """The values that this worker keeps for RRefs, with their creators and holders."""


def statistics() -> Statistics:
    """What RPC is doing on this worker now. Local, does not block.

    Raises: RuntimeError outside of a session.
    """
    agent = current()
    crew = agent.fabric.loop.crew
    return Statistics(
        worker=agent.me.name,
        calls_in_flight={agent.workers[rank].name: calls for rank, calls in sorted(agent.pending.ranks().items())},
        requests_queued=crew.queued,
        requests_running=crew.running,
        requests_open=len(agent.open),
        threads=crew.size,
        messages_sent=sum(agent.sent),
        messages_received=sum(agent.received),
        live_rrefs=tuple(rrefs.live()),
    )

"""What the life cycle of RPC calls: beginning, shutdown, a worker that is lost."""

from __future__ import annotations

from hvlike.rpc.agent import Agent
from hvlike.rpc.rrefs import carrying, creation, fetching, inspection
from hvlike.rpc.rrefs import session as sessions
from hvlike.rpc.rrefs.inspection import LiveRRef


class _Checking:
    leaks = False


def install(agent: Agent) -> None:
    """Begin a session, before the agent takes messages."""
    session = sessions.install(agent)
    carrying.register()
    agent.unwanted = carrying.discard_answer
    agent.when_lost.append(forget)
    creation.serve(session)
    fetching.serve(session)


def release_all() -> None:
    """Take all RRefs of other workers' values away, held or not, and tell their owners. Not in the loop."""
    session = sessions.current()
    session.perform(session.lifetime.drop_all)


def leaked() -> list[str]:
    """What is left after release_all of every worker: values that others still hold."""
    return [str(each) for each in live()]


def uninstall() -> None:
    """End the session: using RRefs of it raises from now on."""
    sessions.uninstall()


def forget(rank: int, failure: Exception) -> None:
    """Worker `rank` is gone: what it held is given up, what it was to create fails with `failure`. In the loop."""
    session = sessions.running()
    if session is not None:
        session.perform_in_loop(session.lifetime.forget, rank, failure)


def set_leak_checking(on: bool) -> None:
    """Whether shutdown raises where RRefs are left over; off by default."""
    _Checking.leaks = on


def checks_leaks() -> bool:
    """Whether it does."""
    return _Checking.leaks


def live() -> list[LiveRRef]:
    """The values that this worker keeps for others; empty outside of a session."""
    session = sessions.running()
    return inspection.live(session) if session is not None else []


def debug_info() -> dict[str, str]:
    """Counts under torch's names. Raises: RuntimeError outside of a session."""
    return inspection.debug_info(sessions.current())

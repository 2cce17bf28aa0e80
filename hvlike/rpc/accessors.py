"""Small questions about the running session."""

from __future__ import annotations

from hvlike.rpc import rrefs
from hvlike.rpc.agent import current
from hvlike.rpc.options import checked_timeout
from hvlike.rpc.worker_info import WorkerInfo


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """The name and rank of a worker; of this one without an argument. Local.

    Raises: RuntimeError outside of a session and for a worker that is not there.
    Source: torch.distributed.rpc.get_worker_info.
    """
    agent = current()
    return agent.me if worker_name is None else agent.worker(worker_name)


def get_rpc_timeout() -> float:
    """Seconds that a call may take which does not say itself; 0: any time. Local.

    Raises: RuntimeError outside of a session.
    Source: torch.distributed.rpc.get_rpc_timeout.
    """
    return current().timeout


def _set_rpc_timeout(rpc_timeout: float) -> None:
    """Set that time for the calls that this worker makes from now on.

    Raises: RuntimeError outside of a session, UsageError (a ValueError) for anything but a number of seconds.
    Source: torch.distributed.rpc._set_rpc_timeout.
    """
    current().timeout = checked_timeout("_set_rpc_timeout", rpc_timeout)


def _get_debug_info() -> dict[str, str]:
    """Counts of this worker under the names that torch programs read. Raises: RuntimeError outside of a session."""
    agent = current()
    crew = agent.fabric.loop.crew
    return {
        "agent.num_pending_requests": str(len(agent.pending)),
        "agent.thread_pool_size": str(agent.options.num_worker_threads),
        "agent.num_idle_threads": str(max(0, agent.options.num_worker_threads - crew.running)),
        **rrefs.debug_info(),
    }

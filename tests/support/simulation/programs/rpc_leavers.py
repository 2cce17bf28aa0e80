"""Random sessions of RPC that some workers leave while others still call them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.simulation.programs.rpc import Author, Call, adds, kept, perform, worker

from hvlike import rpc
from hvlike.system.system import system

ALLOWED = (
    "RPC has been shut down on",
    "RPC has not been initialized",
    "Current RPC agent is not set",
    "has been deleted. Cannot call",
)
"""What an error says of a call to a worker that has left, or of a call by a function that it still runs."""


@dataclass
class Leaving:
    """One session: the calls of each rank, and when each leaves it; None: with the last one."""

    threads: int
    calls: list[tuple[tuple[Call, ...], tuple[int, ...]]]
    leave_after: list[float | None]


@dataclass
class Leavers:
    """Sessions one after the other, each left by some ranks at once."""

    sessions: list[Leaving]

    @classmethod
    def draw(cls, seed: int, size: int) -> Leavers:
        """Draw one."""
        author = Author(seed, size)
        return cls([cls._session(author, author.draw, size) for _ in range(author.draw.choice([1, 2, 3]))])

    @staticmethod
    def _session(author: Author, draw: random.Random, size: int) -> Leaving:
        author.blocking = 0
        calls = [author.calls(0) for _ in range(size)]
        leave_after = [draw.choice([None, 0.0, draw.random() * 20e-3]) for _ in range(size)]
        return Leaving(author.blocking + draw.choice([1, 16]), calls, leave_after)

    def __call__(self, hvd: Any, rank: int) -> None:
        for session in self.sessions:
            rpc.init_rpc(worker(rank), num_worker_threads=session.threads)
            rpc.api._set_leak_checking(True)
            leave_after = session.leave_after[rank]
            thread = system.Thread(target=call_all, args=session.calls[rank], name="program", daemon=True)
            thread.start()
            if leave_after is None:
                thread.join()
                rpc.shutdown()
            else:
                system.sleep(leave_after)
                rpc.shutdown(graceful=False)
                thread.join()
            kept.rrefs.clear()
            hvd.barrier()
        hvd.shutdown()


def call_all(calls: Sequence[Call], order: Sequence[int]) -> None:
    """Make calls; all return what they should, or an error says who has left."""
    try:
        assert perform(calls, order) == sum(map(adds, calls))
    except RuntimeError as error:
        if not any(each in str(error) for each in ALLOWED):
            raise

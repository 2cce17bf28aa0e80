"""The floor of bench rpc: the same bytes there and back by blocking MPI calls of threads that do nothing else."""

from __future__ import annotations

from hvlike import rpc
from hvlike.bench.rpc_work import CALLEE, Trip, Work
from hvlike.transport.raw_messages import RawMessages

EMPTY_BYTES = 64
"""What stands for an empty call."""


class Floor:
    """Plain MPI between ranks 0 and 1. Collective."""

    def __init__(self) -> None:
        self._raw = RawMessages()
        _open.append(self)

    def measure(self, work: Work) -> list[float]:
        """Seconds of each round trip. On rank 0; rank 1 takes part in a thread that serves a call."""
        if not isinstance(work, Trip):
            raise TypeError(f"plain MPI has no {work.title}")
        size, count = work.size or EMPTY_BYTES, work.warm_ups + work.trips
        other = rpc.rpc_async(CALLEE, _take_part, (size, count))
        taken = self.trips(size, count)
        other.wait()
        return taken[work.warm_ups :]

    def trips(self, size: int, count: int) -> list[float]:
        """Seconds of so many messages there and back. Both ranks."""
        return self._raw.round_trips(size, count)

    def close(self) -> None:
        """Free the communicator. Collective."""
        _open.remove(self)
        self._raw.free()


_open: list[Floor] = []
"""Where the calls that rank 1 serves find its floor."""


def _take_part(size: int, count: int) -> None:
    _open[-1].trips(size, count)

"""What bench rpc has a pair of ranks do, over any module with the functions of torch.distributed.rpc.

Rank 0 calls rank 1, whose main thread sleeps. Everything here is run by both contestants, each in processes of its own.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch

from hvlike.bench.conversation import Message
from hvlike.bench.sizes import format_size
from hvlike.errors import HvlikeError

CALLEE = 1

_BYTES_PER_TURN = 256 << 20
_MOST_TRIPS = 200
_WARM_UPS = 20
_CALLS, _CALLS_AT_ONCE = 300, 1500


def nothing() -> None:
    """The empty call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Send a tensor back."""
    return tensor


def used_seconds() -> float:
    """Seconds of a core that this process has used so far."""
    return time.process_time()


@dataclass(frozen=True)
class Trip:
    """A call and its answer, one after the other: empty, or the echo of a tensor of so many bytes."""

    size: int

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"echo of {format_size(self.size)}" if self.size else "empty call"

    @property
    def trips(self) -> int:
        """How many are timed in a turn."""
        return max(1, min(_MOST_TRIPS, _BYTES_PER_TURN // max(1, self.size)))

    @property
    def warm_ups(self) -> int:
        """How many precede them that do not count."""
        return max(1, min(_WARM_UPS, self.trips // 4))

    def measure(self, rpc: ModuleType) -> list[float]:
        """Seconds of each round trip. Blocks. Raises: HvlikeError when a wrong tensor comes back."""
        if not self.size:
            return self._timed(lambda: rpc.rpc_sync(CALLEE, nothing))
        tensor = torch.arange(self.size, dtype=torch.uint8)
        if not torch.equal(rpc.rpc_sync(CALLEE, echo, (tensor,)), tensor):
            raise HvlikeError(f"{rpc.__name__}: the {self.title} is not what was sent")
        return self._timed(lambda: rpc.rpc_sync(CALLEE, echo, (tensor,)))

    def _timed(self, call: Any) -> list[float]:
        for _ in range(self.warm_ups):
            call()
        taken = []
        for _ in range(self.trips):
            start = time.perf_counter()
            # Kept until the clock has stopped: giving the memory back is no part of the trip.
            answer = call()
            taken.append(time.perf_counter() - start)
            del answer
        return taken


@dataclass(frozen=True)
class Rate:
    """Empty calls by rpc_async, always so many of them in flight."""

    in_flight: int

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"{self.in_flight} in flight"

    def measure(self, rpc: ModuleType) -> list[float]:
        """Seconds a call, one value. Blocks."""
        count = _CALLS if self.in_flight == 1 else _CALLS_AT_ONCE
        self._run(rpc, max(_WARM_UPS, self.in_flight))
        start = time.perf_counter()
        self._run(rpc, count)
        return [(time.perf_counter() - start) / count]

    def _run(self, rpc: ModuleType, count: int) -> None:
        flying: deque[Any] = deque()
        for _ in range(count):
            if len(flying) == self.in_flight:
                flying.popleft().wait()
            flying.append(rpc.rpc_async(CALLEE, nothing))
        for future in flying:
            future.wait()


@dataclass(frozen=True)
class Idle:
    """No call at all for a while."""

    seconds: float

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"idle for {self.seconds:g} s"

    def measure(self, rpc: ModuleType) -> list[float]:
        """What each rank uses meanwhile, as a part of a core. Blocks."""
        before = self._used(rpc)
        start = time.perf_counter()
        time.sleep(self.seconds)
        elapsed = time.perf_counter() - start
        return [(after - used) / elapsed for after, used in zip(self._used(rpc), before, strict=True)]

    def _used(self, rpc: ModuleType) -> tuple[float, float]:
        return used_seconds(), rpc.rpc_sync(CALLEE, used_seconds)


Work = Trip | Rate | Idle
_KINDS: dict[str, type[Work]] = {"trip": Trip, "rate": Rate, "idle": Idle}


def as_message(work: Work) -> Message:
    """The same for a process beside this one."""
    (kind,) = [kind for kind, each in _KINDS.items() if isinstance(work, each)]
    return {"kind": kind, **asdict(work)}


def from_message(message: Message) -> Work:
    """The opposite of as_message."""
    arguments = {key: value for key, value in message.items() if key != "kind"}
    return _KINDS[message["kind"]](**arguments)

"""cupy.cuda.nccl over host memory: calls go into the streams of a LateDevice and are done there, among all ranks.

Strict about what NCCL leaves to its caller. The stream has to be the one in use; groups are begun and ended, and hold
at most 2048 calls; one thread at a time uses a device; the ranks make the same calls in the same order; nothing is
called on a communicator that has ended; one that is healthy is not aborted, and not destroyed with work under way. What
a thread of its own does wrong is in `violations`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from support.backends.late_device import LateDevice

INT8, UINT8, INT32, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = 0, 1, 2, 4, 6, 7, 8, 9
_TYPES = {
    INT8: torch.int8,
    UINT8: torch.uint8,
    INT32: torch.int32,
    INT64: torch.int64,
    FLOAT16: torch.float16,
    FLOAT32: torch.float32,
    FLOAT64: torch.float64,
    BFLOAT16: torch.bfloat16,
}
SUM, PROD, MAX, MIN, AVG = range(5)

Call = tuple[str, tuple[int, ...]]
"""What was called, and with what, but for the stream."""


class Meeting(Protocol):
    """How the ranks of a communicator exchange what they have."""

    def allgather(self, value: Any) -> list[Any]:
        """What all ranks have, in their order. Blocks."""


class FakeNccl:
    """Stands for the module; `meet(number, rank, size)` says how the ranks of a communicator find each other."""

    available = True
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64 = INT8, UINT8, INT32, INT64
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = FLOAT16, FLOAT32, FLOAT64, BFLOAT16

    def __init__(self, device: LateDevice, meet: Callable[[bytes, int, int], Meeting]) -> None:
        self.device = device
        self.meet = meet
        self.links: list[FakeLink] = []
        self.numbers = 0
        self.fails = False
        """Whether a communicator cannot be made here."""
        self.violations: list[str] = []
        self._mine = threading.local()
        self._launching = threading.Lock()

    def get_version(self) -> int:
        return 23203

    def get_unique_id(self) -> bytes:
        self.numbers += 1
        return bytes([self.numbers]) * 128

    def NcclCommunicator(self, size: int, number: bytes, rank: int) -> FakeLink:
        assert isinstance(number, bytes)
        assert len(number) == 128
        return self.join(self.meet(number, rank, size), rank, size)

    def join(self, meeting: Meeting, rank: int, size: int) -> FakeLink:
        if any(meeting.allgather(self.fails)):
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
        self.links.append(FakeLink(self, meeting, rank, size))
        return self.links[-1]

    def groupStart(self) -> None:
        assert self.group is None, "groups are not nested here"
        assert self._launching.acquire(blocking=False), "two threads use communicators of one device at a time"
        self._mine.group = []

    def groupEnd(self) -> None:
        calls, self._mine.group = self._mine.group, None
        self._launching.release()
        assert len(calls) <= 2048, f"{len(calls)} calls in a group"
        if calls:
            assert len({(id(link), stream) for link, _, stream in calls}) == 1
            link, _, stream = calls[0]
            link.enqueue([call for _, call, _ in calls], stream)

    @property
    def group(self) -> list[tuple[FakeLink, Call, int]] | None:
        """What was called since groupStart."""
        return getattr(self._mine, "group", None)


class FakeLink:
    """A communicator."""

    def __init__(self, nccl: FakeNccl, meeting: Meeting, rank: int, size: int) -> None:
        self.nccl = nccl
        self.meeting = meeting
        self.rank = rank
        self.size = size
        self.calls: list[list[Call]] = []
        self.done = 0
        self.aborted = threading.Event()
        self.destroyed = threading.Event()
        self.failure: Exception | None = None

    def check_async_error(self) -> None:
        if self.failure is not None:
            raise self.failure

    def abort(self) -> None:
        if self.failure is None and not self.is_busy:
            self.nccl.violations.append("a healthy communicator was aborted")
        self._end(self.aborted)

    def destroy(self) -> None:
        if self.is_busy:
            self.nccl.violations.append("a communicator was destroyed with work under way")
        self._end(self.destroyed)

    def _end(self, how: threading.Event) -> None:
        if self.aborted.is_set() or self.destroyed.is_set():
            self.nccl.violations.append("a communicator was ended twice")
        how.set()

    @property
    def is_busy(self) -> bool:
        return self.done < len(self.calls)

    def allReduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("allReduce", (send, receive, count, dtype, op), stream)

    def reduce(self, send: int, receive: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._call("reduce", (send, receive, count, dtype, op, root), stream)

    def broadcast(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._call("broadcast", (send, receive, count, dtype, root), stream)

    def send(self, send: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call("send", (send, count, dtype, peer), stream)

    def recv(self, receive: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call("recv", (receive, count, dtype, peer), stream)

    def _call(self, what: str, arguments: tuple[int, ...], stream: int) -> None:
        device = self.nccl.device
        assert device.address(device.current_stream(device.home())) == stream, "not the stream in use"
        if self.nccl.group is None:
            assert what not in ("send", "recv"), "they wait for each other outside of a group"
            self.enqueue([(what, arguments)], stream)
        else:
            self.nccl.group.append((self, (what, arguments), stream))

    def enqueue(self, calls: list[Call], stream: int) -> None:
        assert not any(end.is_set() for end in (self.aborted, self.destroyed)), "the communicator has ended"
        self.calls.append(calls)
        self.nccl.device.streams[stream - 1].put(lambda: self._run(calls))

    def _run(self, calls: list[Call]) -> None:
        """Do the calls of a group, in the thread of the stream."""
        mine = [_contribution(call, self.rank) for call in calls]
        everybody = self.meeting.allgather(mine)
        collective = [[each for each, _, _ in said if each[0] not in ("send", "recv")] for said in everybody]
        assert all(said == collective[0] for said in collective), f"the ranks differ: {collective}"
        received = {
            (sender, peer): value
            for sender, said in enumerate(everybody)
            for each, peer, value in said
            if each[0] == "send"
        }
        for index, (what, arguments) in enumerate(calls):
            if what == "recv":
                _memory(arguments[0], arguments[1], arguments[2]).copy_(received.pop((arguments[3], self.rank)))
            elif what != "send":
                _finish(what, arguments, [said[index][2] for said in everybody], self.rank)
        assert not [key for key in received if key[1] == self.rank], "sent, and not received"
        self.done += 1


def _memory(address: int, count: int, dtype: int) -> torch.Tensor:
    kind = _TYPES[dtype]
    return torch.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), dtype=kind)


def _contribution(call: Call, rank: int) -> tuple[tuple[Any, ...], int, torch.Tensor | None]:
    """What the call is, as all ranks must make it; to whom it goes; and the values."""
    what, arguments = call
    if what == "recv":
        return (what,), arguments[3], None
    if what == "send":
        return (what,), arguments[3], _memory(*arguments[:3]).clone()
    address, _, count, dtype, *rest = arguments
    reads = what != "broadcast" or rest[0] == rank
    return (what, count, dtype, *rest), -1, _memory(address, count, dtype).clone() if reads else None


def _finish(what: str, arguments: tuple[int, ...], values: list[Any], rank: int) -> None:
    _, receive, count, dtype, *rest = arguments
    if what == "broadcast":
        _memory(receive, count, dtype).copy_(values[rest[0]])
    elif what == "allReduce" or rest[1] == rank:
        _memory(receive, count, dtype).copy_(_reduce(rest[0], values))


def _reduce(op: int, values: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.stack([each.double() if each.is_floating_point() else each for each in values])
    if op == PROD:
        return wide.prod(0)
    if op == MAX:
        return wide.amax(0)
    if op == MIN:
        return wide.amin(0)
    return wide.sum(0) if op == SUM else wide.mean(0)

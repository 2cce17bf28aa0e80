"""What the timeline shows of the operations of a process set.

Every named operation has a row, unnamed ones share a few. In its row follow each other
    NEGOTIATE_ALLREDUCE    from the call until all ranks have asked for it
    QUEUE                  until its turn has come
    ALLREDUCE              until it is done
The row of an op queue shows what runs there: a batch of operations or a bucket of gradients, and the phases within.
An arrow leads from the call of the rank that asked last to the operation on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name
from hvlike.backends.base import Backend, TracedBackend, total_bytes
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.request import Request, RequestKey, RequestSpec
from hvlike.observe.recorder import Recorder
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group

MOST_ROWS = 500  # Names with a row of their own; further ones share rows as unnamed operations do
MOST_ARROWS = 16  # Ranks to which arrows lead from the one that asked last: those that follow it


class Trace:
    def __init__(self, recorder: Recorder, group: Group) -> None:
        self.recorder = recorder
        self._group = group
        self.serial = 0  # Responses announced: the same on every rank, so counted also while nothing is recorded
        self._generation = 0
        self._rows: dict[RequestKey, tuple[int, str, int]] = {}
        self._free: dict[str, list[str]] = {}
        self._shared: dict[str, int] = {}
        self._arrows: dict[RequestKey, str] = {}
        self._heard: dict[RequestKey, list[tuple[int, int]]] = {}

    def submitted(self, request: Request) -> None:
        self._renew()
        title = self._title(request.key)
        row, now = self.recorder.row(title), self.recorder.now
        self._rows[request.key] = (row, title, now)
        arguments = self._describe(request.spec, request.tensors)
        self.recorder.begin(row, f"NEGOTIATE_{request.spec.kind.upper()}", arguments, now)
        self._show_heard(request.key, row)

    def ready(self, rank: int, key: RequestKey) -> None:
        self._renew()
        self._heard.setdefault(key, []).append((rank, self.recorder.now))
        known = self._rows.get(key)
        if known is not None:
            self._show_heard(key, known[0])

    def cycle(self) -> None:
        if self.recorder.on and self.recorder.marks_cycles:
            self.recorder.instant(self.recorder.row(f"set {self._group.number} coordinator"), "CYCLE_START")

    def decided(self, response: Response) -> None:
        """The coordinator has announced an operation. Called for each, on every rank, in the order of all."""
        self.serial += 1
        if not self.recorder.on:
            return
        key = response.key
        known = self._known(key)
        if known is None:
            self._heard.pop(key, None)
            return
        row, _, asked = known
        self._show_heard(key, row)
        if response.error is not None:
            self.recorder.end(row, {"error": str(response.error)})
            self._leave(key)
            return
        now = self.recorder.now
        self.recorder.end(row, at=now)
        self.recorder.begin(row, "QUEUE", at=now)
        ranks = self._group.ranks
        if response.last not in ranks:
            return
        last = ranks.index(response.last)
        arrow = f"{self._group.number}.{self.serial}."
        if last == self._group.rank:
            for distance in range(1, min(len(ranks), MOST_ARROWS + 1)):
                self.recorder.flow_from(row, f"{arrow}{ranks[(last + distance) % len(ranks)]}", asked)
        elif (self._group.rank - last) % len(ranks) <= MOST_ARROWS:
            self._arrows[key] = f"{arrow}{ranks[self._group.rank]}"

    def began(self, batch: Sequence[tuple[Request, Response]]) -> None:
        for request, _ in batch:
            known = self._known(request.key)
            if known is not None:
                row, now = known[0], self.recorder.now
                self.recorder.end(row, at=now)
                self.recorder.begin(row, request.spec.kind.upper(), {"fused": len(batch)}, now)
                arrow = self._arrows.pop(request.key, None)
                if arrow is not None:
                    self.recorder.flow_to(row, arrow, now)

    def ended(self, batch: Sequence[tuple[Request, Response]]) -> None:
        for request, _ in batch:
            known = self._known(request.key)
            if known is not None:
                self.recorder.end(known[0])
                self._leave(request.key)

    def observe(self, queue: OpQueue, batch: Sequence[tuple[Request, Response]], job: Job) -> Job:
        kind = batch[0][0].spec.kind.upper()
        tensors = [tensor for request, _ in batch for tensor in request.tensors]

        def run(backend: Backend) -> Coroutine[None]:
            self.began(batch)
            try:
                yield from recorded(self.recorder, queue, kind, {"operations": len(batch)}, tensors, job)(backend)
            finally:
                self.ended(batch)

        return run

    def _renew(self) -> None:
        if self._generation != self.recorder.generation:
            self._generation = self.recorder.generation
            for table in (self._rows, self._free, self._shared, self._arrows, self._heard):
                table.clear()

    def _show_heard(self, key: RequestKey, row: int) -> None:
        """Mark who has asked; others may have done so before this rank has given the operation a row."""
        for rank, at in self._heard.pop(key, ()):
            self.recorder.instant(row, str(rank), at=at)

    def _known(self, key: RequestKey) -> tuple[int, str, int] | None:
        return self._rows.get(key) if self._generation == self.recorder.generation else None

    def _title(self, key: RequestKey) -> str:
        """A row that nothing else is in: that of the name, or a free one of those that are shared."""
        kind, name = key
        prefix = f"set {self._group.number} " if self._group.number else ""
        if not name.startswith("noname.") and self.recorder.rows < MOST_ROWS:
            return f"{prefix}{kind}.{name}"
        base = f"{prefix}{kind} (unnamed)"
        free = self._free.setdefault(base, [])
        if free:
            return free.pop()
        self._shared[base] = self._shared.get(base, 0) + 1
        return f"{base} {self._shared[base]}"

    def _leave(self, key: RequestKey) -> None:
        _, title, _ = self._rows.pop(key)
        base = title.rpartition(" ")[0]
        if base in self._free and base.endswith("(unnamed)"):
            self._free[base].append(title)

    def _describe(self, spec: RequestSpec, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        said: dict[str, Any] = {"process_set": self._group.number}
        if tensors:
            said |= {
                "bytes": total_bytes(tensors),
                "dtype": ", ".join(dict.fromkeys(spec.dtypes)),
                "shape": [list(shape) for shape in spec.shapes[:8]],
            }
        if spec.op >= 0:
            said["op"] = op_name(ReduceOp(spec.op))
        if spec.root >= 0:
            said["root"] = spec.root
        return said


def begin_wait(queue: OpQueue, name: str, step: int) -> int:
    """The caller waits in a planned reduction, which nothing hides; returns the row of the timeline to end then."""
    recorder = queue.recorder
    row = recorder.row(f"step of {name}")
    recorder.begin(row, "WAIT", {"step": step, "process_set": queue.group.number})
    return row


@contextmanager
def exposed_wait(queue: OpQueue, name: str, step: int) -> Iterator[None]:
    """Around what a caller waits for in a planned reduction, for the figures and the timeline."""
    began, recorder = system.monotonic(), queue.recorder
    row = begin_wait(queue, name, step) if recorder.on else None
    try:
        yield
    finally:
        if row is not None:
            recorder.end(row)
        queue.counters.waited(name, system.monotonic() - began)


def recorded(
    recorder: Recorder, queue: OpQueue, name: str, arguments: dict[str, Any], tensors: Sequence[torch.Tensor], job: Job
) -> Job:
    """A job that stands in the row of its queue while it runs, with the phases of its backend inside."""

    def run(backend: Backend) -> Coroutine[Any]:
        if not recorder.on:
            return (yield from job(backend))
        row = recorder.row(f"set {queue.group.number} queue {queue.number}")
        recorder.begin(row, name, {**arguments, "tensors": len(tensors), "bytes": total_bytes(tensors)})
        try:
            return (yield from job(TracedBackend(backend, recorder, row)))
        finally:
            recorder.end(row)

    return run

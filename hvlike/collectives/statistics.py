"""hvd.statistics: what this rank has done and what it waits for, as figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvlike.collectives.context import Context, current
from hvlike.collectives.schedule import PLANNED
from hvlike.observe.counters import Moved, Waits
from hvlike.transport.traffic import Sent


@dataclass(frozen=True)
class Unfinished:
    """An operation that this rank has asked for, or waits for, and that is not over."""

    kind: str
    """"allreduce", "broadcast", ...; "step" for the gradients of an optimizer or a wrapped model."""
    name: str
    """As the caller has given it, or made by hvlike."""
    seconds: float
    """How long ago it was asked for."""
    place: str
    """File and line of the call."""
    tensors: str
    """Shapes and dtypes, or the parameters whose gradients are reduced."""
    process_set: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.tensors or 'nothing'}, {self.seconds:.1f} s ago at {self.place}"


@dataclass(frozen=True)
class Statistics:
    """Figures of one rank at one moment; they count from init() on."""

    rank: int
    size: int
    seconds: float
    """Since init()."""
    operations: Mapping[str, Moved]
    """What was agreed by name, by kind ("allreduce", "broadcast", ...). Kinds that have not run are not there."""
    express_operations: int
    """Allreduces that all ranks of a node called at the same time, and that went without an agreement."""
    express_bytes: int
    gradients: Moved
    """Buckets of gradients, whose order is agreed once: each is a batch, its operations are the tensors in it."""
    waits: Mapping[str, Waits]
    """Exposed waits, in step() or at the end of a backward, by the name of the optimizer or wrapped model."""
    sent: Sent
    """Messages that have left this rank: control messages by kind, and data between nodes."""
    unfinished: int
    """Operations that are not over."""
    oldest: Unfinished | None
    """The one of them that was asked for first; None where there is none."""

    @property
    def bytes(self) -> int:
        """Of this rank's tensors in all operations."""
        return sum(each.bytes for each in self.operations.values()) + self.express_bytes + self.gradients.bytes

    @property
    def batches(self) -> int:
        """Runs that carried the operations out."""
        return sum(each.batches for each in self.operations.values()) + self.express_operations + self.gradients.batches

    @property
    def wait_seconds(self) -> float:
        """All exposed waits together."""
        return sum(each.seconds for each in self.waits.values())

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.size}, {self.seconds:.1f} s since init()"]
        moved = {**self.operations, "gradients": self.gradients}
        lines += [f"  {kind}: {each}" for kind, each in moved.items() if each.batches]
        if self.express_operations:
            lines.append(f"  allreduce at once: {self.express_operations} operations, {self.express_bytes} bytes")
        lines += [f"  exposed waits of {name}: {each}" for name, each in self.waits.items()]
        sent = self.sent
        lines.append(f"  sent: {sent.control_messages} control messages, {sent.data_bytes} bytes to other nodes")
        lines.append(f"  unfinished: {self.unfinished}" + (f", the oldest: {self.oldest}" if self.oldest else ""))
        return "\n".join(lines)


def statistics() -> Statistics:
    """Return what this rank has done since init() and what it waits for now.

    Local, may be called at any time from any thread, does not block. The ranks' figures differ in times, and where
    they have done different things. Counting is always on: some tenths of a microsecond for a batch.
    Raises: NotInitializedError.
    """
    context = current()
    fabric = context.fabric
    moved = fabric.counters.moved()
    memberships = list(context.registry.memberships.values())
    ways = [each.express for each in memberships if each.express is not None]
    unfinished = _unfinished(context)
    return Statistics(
        rank=context.world.rank,
        size=context.world.size,
        seconds=time.monotonic() - fabric.counters.since,
        operations={kind: each for kind, each in moved.items() if kind != PLANNED},
        express_operations=sum(each.served for each in ways),
        express_bytes=sum(each.bytes for each in ways),
        gradients=moved.get(PLANNED, Moved()),
        waits=fabric.counters.waits(),
        sent=fabric.traffic.snapshot(),
        unfinished=len(unfinished),
        oldest=max(unfinished, key=lambda each: each.seconds, default=None),
    )


def _unfinished(context: Context) -> list[Unfinished]:
    return [
        Unfinished(each.key[0], each.key[1], each.seconds, each.place, each.detail.removeprefix(": "), number)
        for number, membership in list(context.registry.memberships.items())
        for each in membership.negotiator.unfinished().values()
    ]

"""What a job says about itself: statistics(), the timeline's start and stop, and the metrics of hvd.progress.

Metrics go to rank 0 in one-way messages: a collective would hang where ranks have different numbers of batches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hvlike.collectives.persistent.schedule import PLANNED
from hvlike.collectives.session.context import Context, current
from hvlike.errors import WrongTypeError
from hvlike.observe.counters import Means, Moved, Sums, Waits
from hvlike.system.system import system
from hvlike.transport.messages.traffic import Sent, Topic


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
    """What one rank has done from init() to the moment of the call."""

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
    restarts: int = 0
    """How often hvlike has started again in this job, under `mpirun --with-ft ulfm`."""
    lost_ranks: int = 0
    """Processes that the job has lost by then, spares included."""

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
        if self.restarts:
            lines.append(f"  started again {self.restarts} times, {self.lost_ranks} processes lost")
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
    set_states = list(context.registry.set_states.values())
    ways = [each.inline for each in set_states if each.inline is not None]
    unfinished = _unfinished(context)
    return Statistics(
        rank=context.world.rank,
        size=context.world.size,
        seconds=system.monotonic() - fabric.counters.since,
        operations={kind: each for kind, each in moved.items() if kind != PLANNED},
        express_operations=sum(each.served for each in ways),
        express_bytes=sum(each.bytes for each in ways),
        gradients=moved.get(PLANNED, Moved()),
        waits=fabric.counters.waits(),
        sent=fabric.traffic.snapshot(),
        unfinished=len(unfinished),
        oldest=max(unfinished, key=lambda each: each.seconds, default=None),
        restarts=0 if context.world.job is None else context.world.job.restarts,
        lost_ranks=0 if context.world.job is None else context.world.job.losses,
    )


def _unfinished(context: Context) -> list[Unfinished]:
    return [
        Unfinished(each.key[0], each.key[1], each.seconds, each.place, each.detail.removeprefix(": "), number)
        for number, set_state in list(context.registry.set_states.items())
        for each in set_state.controller.unfinished().values()
    ]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what the operations of this rank do into a Chrome-trace file, which is valid JSON at every moment.

    Local, may be called at any time, does not block. If all ranks record, the merged file has arrows between ranks.
    Unlike with Horovod, HVLIKE_TIMELINE=DYNAMIC need not be set.

    Args:
        file_path: The file of rank 0; rank 1 writes timeline.rank1.json beside timeline.json, and so on. An
            existing file is overwritten.
        mark_cycles: Also show each announcement of the coordinator.

    Raises:
        NotInitializedError: Before init().
        UsageError: If a timeline is recorded already, or the file cannot be written; on the calling rank only (a
            ValueError).

    Source: horovod.torch.start_timeline.
    """
    context = current()
    if not isinstance(file_path, (str, os.PathLike)):
        raise WrongTypeError(f"start_timeline: expected the path of a file, got {type(file_path).__name__}.")
    limit = context.knobs.timeline_max_bytes
    context.fabric.recorder.start(os.fspath(file_path), mark_cycles=bool(mark_cycles), max_bytes=limit)


def stop_timeline() -> None:
    """Write what was recorded and close the file; does nothing when no timeline is recorded.

    Local, may be called at any time, does not block. Returns None. Raises: NotInitializedError.
    Source: horovod.torch.stop_timeline.
    """
    current().fabric.recorder.stop()


_MESSAGES_PER_SECOND = 2000

Column = tuple[str, int]  # A title, and how many of this title came before on its rank


class MetricsAggregator:
    """The figures of one job: on rank 0 those of all ranks, elsewhere those of this one."""

    def __init__(self, context: Context) -> None:
        self._rank = context.world.rank
        self._channel = context.fabric.channel
        self._lock = system.Lock()
        self._means: dict[Column, Means] = {}
        self._titles: dict[str, int] = {}
        # Seconds between two messages of a rank in one column.
        self.pause = max(0.5, context.world.size / _MESSAGES_PER_SECOND)
        if self._rank == 0:
            self._channel.listen(Topic.METRICS, lambda rank, message, tensors: self._hear(*message))

    def open(self, title: str) -> Column:
        """A new column; all ranks that open the same titles in the same order share them."""
        with self._lock:
            number = self._titles.get(title, 0)
            self._titles[title] = number + 1
            return (title, number)

    def report(self, column: Column, sums: Sums) -> None:
        """Add figures of this rank, and tell rank 0. Any thread; does not block."""
        self._hear(column, sums)
        if self._rank:
            self._channel.send_soon(0, Topic.METRICS, (column, dict(sums)))

    def means(self, column: Column) -> dict[str, float]:
        with self._lock:
            return self._means[column].means() if column in self._means else {}

    def _hear(self, column: Column, sums: Any) -> None:
        with self._lock:
            self._means.setdefault(column, Means()).add(sums)


_aggregators: WeakKeyDictionary[Context, MetricsAggregator] = WeakKeyDictionary()


def metrics_of(context: Context) -> MetricsAggregator:
    found = _aggregators.get(context)
    if found is None:
        found = _aggregators[context] = MetricsAggregator(context)
    return found

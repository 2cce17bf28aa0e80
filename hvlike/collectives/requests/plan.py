"""What ranks agree on once for operations that then run without a message: plans of gradient buckets, and queues.

Pure functions of the proposals of all ranks, so every rank computes the same plan. No messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hvlike.errors import MismatchError, ShapeMismatchError

Options: TypeAlias = tuple[tuple[str, str], ...]
"""What each is called, and its value as text."""


def find_difference(theirs: Options, ours: Options) -> tuple[str, str, str] | None:
    """What differs first, and both values."""
    before, after = dict(theirs), dict(ours)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            return name, before.get(name, "nothing"), after.get(name, "nothing")
    return None


class QueueProposal(NamedTuple):
    described: Options  # What must be equal on all ranks, in order: what it is, and its value
    advice: str
    spare_queue: int = -1  # A queue that an earlier owner on this rank has given back; -1: none
    serial: int = -1
    device: str = ""  # The kind of the device that the queue needs a backend for; empty for none
    options: Options = ()  # As Proposal.options


def merge_queue_proposals(proposals: Sequence[QueueProposal]) -> QueueProposal:
    """The first one's, with the spare queue only where all have the same."""
    first = proposals[0]
    same = all(each.spare_queue == first.spare_queue for each in proposals)
    return first._replace(spare_queue=first.spare_queue if same else -1)


def find_queue_mismatch(name: str, ranks: Sequence[int], proposals: Sequence[QueueProposal]) -> MismatchError | None:
    first, advice = _everything(proposals[0]), proposals[0].advice
    for rank, other in zip(ranks, map(_everything, proposals), strict=True):
        found = find_difference(first, other)
        if found is not None:
            key, mine, its = found
            return MismatchError(
                f"Mismatched {key} in {name!r}: rank {ranks[0]} has {mine}, rank {rank} has {its}. {advice}"
            )
        if other != first:
            mine, its = (", ".join(dict(each)) for each in (first, other))
            return MismatchError(
                f"Mismatched order in {name!r}: rank {ranks[0]} lists {mine}, rank {rank} lists {its}. {advice}"
            )
    return None


def _everything(proposal: QueueProposal) -> Options:
    return (*proposal.described, ("device", proposal.device)) if proposal.device else proposal.described


OVERLAPPED_BUCKET_BYTES = 8 << 20  # Bucket size where communication can run beside backward
SINGLE_BUCKET_BYTES = 64 << 20  # Bucket size where it cannot, so that fewer buckets cost less
ACROSS_BUCKET_BYTES = 3 << 20
"""Bucket size across nodes, unless each has one rank, which starts all after backward over a fast network: then single
ones took three quarters of the time for 97 MiB on three hosts. On a slow network small ones start early: of 13 MiB
over 1 Gbit/s 80 ms were left at the end of backward, with buckets of 4 MiB 120, without an early start 160.
"""
DEVICE_BUCKET_BYTES = 24 << 20  # Of tensors of a GPU: about that of DistributedDataParallel. Not measured yet


class BucketSizes(NamedTuple):
    bucket_bytes: int
    first_bucket_bytes: int  # The most that the first bucket holds: where it is less, communication starts earlier


def choose_sizes(
    bucket_bytes: int | None,
    first_bucket_bytes: int | None,
    *,
    overlaps: bool,
    on_device: bool = False,
    nodes: Sequence[Sequence[int]] = (),
    slow_network: bool = False,
) -> BucketSizes:
    """What the user has set, else what suits a reduction beside backward or after it, and tensors of a GPU.

    nodes: the ranks of each; slow_network: between them.
    """
    suited = OVERLAPPED_BUCKET_BYTES if overlaps else SINGLE_BUCKET_BYTES
    if len(nodes) > 1 and (overlaps or slow_network or max(map(len, nodes)) > 1):
        suited = ACROSS_BUCKET_BYTES
    chosen = bucket_bytes or (DEVICE_BUCKET_BYTES if on_device else suited)
    return BucketSizes(chosen, first_bucket_bytes or chosen)


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Proposal(NamedTuple):
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    sparse: tuple[bool, ...]
    order: tuple[int, ...]  # Entries in the order they arrived here; entries that did not arrive come last
    sizes: BucketSizes
    settings: tuple[Any, ...]  # What else has to be equal: op, factors, compression, groups
    devices: tuple[str, ...]  # Kind of the device of each; empty for those that are reduced in host memory
    spare_queue: int = -1  # A queue that an earlier reducer of this rank has given back; -1: none
    portable: Any = None  # What a rank without this reducer must know to take part for one that has joined
    serial: int = -1  # Number of the agreed plan; different from that of every other plan of the process set
    start: tuple[int, ...] = ()  # Fingerprints of the parameters before the first step, by entry; empty: not compared
    options: Options = ()  # Of the optimizer, as OptionWatch has them; merged: the first one's
    apart: tuple[int, int] | None = None  # Merged: a member whose parameters are not the first one's, and the entry

    @property
    def device(self) -> str:
        return next(filter(None, self.devices), "")


@dataclass(frozen=True)
class Plan:
    buckets: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...] | None, ...]  # On which all ranks agree, by entry; None: row by row
    sparse: tuple[int, ...]


def merge_proposals(proposals: Sequence[Proposal]) -> Proposal:
    """What all ranks can agree on: the first one's order, sparse where any is, strides and queue where all agree."""
    first = proposals[0]
    sparse = tuple(any(each.sparse[index] for each in proposals) for index in range(len(first.names)))
    strides = tuple(
        stride if all(each.strides[index] == stride for each in proposals) else None
        for index, stride in enumerate(first.strides)
    )
    # Ranks can lag behind in giving queues back; then a new one is opened.
    spare_queue = first.spare_queue if all(each.spare_queue == first.spare_queue for each in proposals) else -1
    apart = find_apart([each.start for each in proposals])
    return first._replace(sparse=sparse, strides=strides, spare_queue=spare_queue, start=(), apart=apart)


def find_apart(starts: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Which member differs first from the first one, and in which entry; None where they are equal or unknown."""
    first = starts[0]
    for position, start in enumerate(starts):
        if len(start) == len(first):
            for entry, (mine, its) in enumerate(zip(first, start, strict=True)):
                if mine != its:
                    return position, entry
    return None


def make_plan(agreed: Proposal, itemsizes: Sequence[int], groups: Sequence[Sequence[int]]) -> Plan:
    """The plan that follows from the merged proposals; groups are never cut apart."""
    sparse = tuple(index for index, is_sparse in enumerate(agreed.sparse) if is_sparse)
    order = [index for index in agreed.order if not agreed.sparse[index]]
    sizes = [math.prod(shape) * itemsize for shape, itemsize in zip(agreed.shapes, itemsizes, strict=True)]
    kinds = list(zip(agreed.dtypes, agreed.devices, strict=True))
    buckets = fill_buckets(units(order, groups), sizes, kinds, *agreed.sizes)
    return Plan(tuple(tuple(bucket) for bucket in buckets), agreed.strides, sparse)


def units(order: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """What is reduced together, in the order in which it is complete: a group counts when its last member arrives."""
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    present = set(order)
    waiting = {number: [index for index in group if index in present] for number, group in enumerate(groups)}
    missing = {number: len(members) for number, members in waiting.items()}
    result = []
    for index in order:
        number = group_of.get(index)
        if number is None:
            result.append([index])
            continue
        missing[number] -= 1
        if not missing[number]:
            result.append(waiting[number])
    return result


def fill_buckets(
    parts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    kinds_of: Sequence[Hashable],
    limit: int,
    first_limit: int | None = None,
) -> list[list[int]]:
    """Join parts, in order, to buckets of at most `limit` bytes and one kind each; a larger part is one alone."""
    buckets: list[list[int]] = []
    filled = 0
    kinds: set[Hashable] = set()
    for part in parts:
        size = sum(sizes[index] for index in part)
        kind = {kinds_of[index] for index in part}
        most = first_limit if first_limit is not None and len(buckets) == 1 else limit
        if buckets and kind == kinds and filled + size <= most:
            buckets[-1].extend(part)
            filled += size
        else:
            buckets.append(list(part))
            filled, kinds = size, kind
    return buckets


def equal_parts(count: int, groups: int) -> list[list[int]]:
    """Entries 0 to count-1 as `groups` runs of nearly equal length: 5 in 2 -> [0 1 2] [3 4]."""
    groups = min(groups, count)
    return [part.tolist() for part in np.array_split(np.arange(count), groups)] if groups else []


def describe_names(names: Sequence[str]) -> str:
    """The parameters of a reduction, the first few of them: ": 0.weight, 0.bias, 2.weight, ... (8 in all)"."""
    return f": {', '.join(names[:4])}" + (f", ... ({len(names)} in all)" if len(names) > 4 else "")


def find_plan_mismatch(name: str, ranks: Sequence[int], proposals: Sequence[Proposal]) -> MismatchError | None:
    first = proposals[0]
    for rank, other in zip(ranks, proposals, strict=True):
        if len(other.names) != len(first.names):
            only = sorted(set(first.names) ^ set(other.names))[:5]
            return MismatchError(
                f"Mismatched parameters in {name!r}: rank {ranks[0]} has {len(first.names)}, rank {rank} has "
                f"{len(other.names)}; only one of them has {', '.join(map(repr, only))}. Build the same model, with "
                "the same requires_grad flags, on every rank, and run lazy modules on all of them."
            )
        for index, entry in enumerate(first.names):
            for what, value, error in _COMPARED:
                mine, its = value(first)[index], value(other)[index]
                if mine != its:
                    return error(
                        f"Mismatched {what} of parameter {index} ({entry!r}) in {name!r}: rank {ranks[0]} has {mine}, "
                        f"rank {rank} has {its}. Build the same model on every rank."
                    )
        for what, mine, its in zip(_SETTINGS, _flat(first.settings), _flat(other.settings), strict=True):
            if mine != its:
                return MismatchError(
                    f"Mismatched settings of {name!r}, {what}: rank {ranks[0]} has {mine}, rank {rank} has {its}. "
                    "Wrap the optimizer with the same arguments on every rank."
                )
    return None


def _flat(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    described, groups = settings
    return (*described, groups)


_SETTINGS = ("op", "prescale_factor", "postscale_factor", "compression", "groups")

_COMPARED: tuple[tuple[str, Callable[[Proposal], Sequence[Any]], type[MismatchError]], ...] = (
    ("names", lambda each: each.names, MismatchError),
    ("shapes", lambda each: [list(shape) for shape in each.shapes], ShapeMismatchError),
    ("data types", lambda each: each.dtypes, MismatchError),
    ("devices", lambda each: [device or "host memory" for device in each.devices], MismatchError),
)

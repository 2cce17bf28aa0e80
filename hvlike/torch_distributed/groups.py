"""Making a group of torch.distributed: a process set that its members make without the other ranks.

    meet       all members say that they are here; the first of them says when they all are, or who is missing
    enroll     the communicators between nodes, the op queues and the state of the process set
    calls      an op queue for the group's calls, in the order in which each member makes them

torch.distributed calls the creator on the members of a group only, and with use_local_synchronization the other ranks
do not even know of it. So these process sets have numbers that follow from the name of the group.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.requests.process_set import FIRST_PRIVATE_SET, ProcessSet, global_process_set
from hvlike.collectives.session.context import Context, current
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import HorovodInternalError, StalledError, UsageError
from hvlike.torch_distributed.calls import CallQueue
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine

T = TypeVar("T")

_MARGIN_SECONDS = 5.0  # What a member waits longer than the first one, which then says who is missing


def open_group(name: str, ranks: Sequence[int], seconds: float) -> CallQueue:
    """Make a group on this rank, a member. Every member calls it. Blocks until all have, at most so many seconds.

    name: the same on all members, and not in use. ranks: of the job, in the order of the group.
    Raises: StalledError: It names the members that are missing. PeerLeftError: A member is lost.
    """
    context = current()
    loop = context.fabric.loop
    task = loop.start(_open(context, name, tuple(ranks), time.monotonic() + seconds), wake=False)

    def lose(errors: Mapping[int, HorovodInternalError]) -> None:
        gone = [errors[rank] for rank in ranks if rank in errors]
        if gone:
            loop.cancel(task, gone[0])

    context.when_lost.append(lose)
    loop.post(lambda: lose(context.lost), wake=False)
    try:
        loop.wait(lambda: task.done)
    finally:
        context.when_lost.remove(lose)
    if task.error is not None:
        raise task.error
    assert task.result is not None
    return CallQueue(context, *task.result, name, seconds)


def _open(
    context: Context, name: str, ranks: tuple[int, ...], deadline: float
) -> Coroutine[tuple[ProcessSetState, OpQueue]]:
    missing = yield from meet(context.fabric, ranks, ("group", name), deadline)
    if missing:
        raise StalledError(
            f"rank {context.world.rank}: the group {name!r} of torch.distributed with {name_ranks(ranks)} was not made "
            f"in time: missing {name_ranks(missing)}. Every rank has to make the same groups in the same order."
        )
    set_state = yield from context.registry.enroll_members(private_number(name), ranks)
    queue = yield from set_state.queues.take(-1)
    return set_state, queue


def private_number(name: str) -> int:
    """The number of the process set of a group, which no other has."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return FIRST_PRIVATE_SET + int.from_bytes(digest, "big")


def meet(fabric: Fabric, ranks: Sequence[int], key: tuple[str, str], deadline: float) -> Coroutine[list[int]]:
    """Wait until all members are here; the ranks of those that were not in time."""
    leader, *others = ranks
    mailbox, me = fabric.mailbox, fabric.world.rank
    if me != leader:
        mailbox.send(leader, key, True)
        told = yield from _until(mailbox.receive(leader, key), deadline + _MARGIN_SECONDS)
        return [leader] if told is None else told
    came = {}
    for rank in others:
        came[rank] = yield from _until(mailbox.receive(rank, key), deadline)
    missing = [rank for rank in others if not came[rank]]
    for rank in others:
        if rank not in missing:
            mailbox.send(rank, key, missing)
    return missing


def _until(coroutine: Coroutine[T], deadline: float) -> Coroutine[T | None]:
    """What a coroutine returns; None if that takes longer."""
    while True:
        try:
            wait = coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if time.monotonic() > deadline:
            coroutine.close()
            return None
        yield wait


def close_group(calls: CallQueue) -> None:
    """Destroy a group on this rank; what is in flight in it ends with ShutdownError. Blocks for a moment."""
    calls.close()
    context = current()
    loop = context.fabric.loop
    task = loop.start(context.registry.dismiss(context.registry.sets[calls.group.number]), wake=False)
    try:
        loop.wait(lambda: task.done)
    except HorovodInternalError:
        # hvlike is to start again, since a rank is lost: the group goes with all that there is.
        return
    if task.error is not None:
        raise task.error


class GroupNames:
    """Names under which no earlier group was known: torch.distributed numbers its groups anew after a destroy."""

    def __init__(self) -> None:
        self._defaults = 0
        self._of_members: Counter[tuple[int, ...]] = Counter()

    def unique(self, name: str, ranks: Sequence[int], *, default: bool) -> str:
        """The name of a group that torch calls `name`, the same on all members.

        default: it is the group of all ranks, which is made first.
        """
        self._defaults += default
        if not name.isdecimal():
            # Made by its members alone: torch's name depends on how many groups a rank knows, which may differ.
            key = tuple(ranks)
            self._of_members[key] += 1
            digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
            name = f"{digest}-{self._of_members[key]}"
        return f"{name}.{self._defaults}"


class _Run:
    """The last run of hvlike that has had a group."""

    context: Context | None = None
    names = GroupNames()


def names() -> GroupNames:
    """The names of this run: a rank that takes part only since hvlike has started again knows of no earlier groups."""
    if _Run.context is not current():
        _Run.context, _Run.names = current(), GroupNames()
    return _Run.names


def process_set_of(group: Any) -> ProcessSet:
    """Return the process set of a group of torch.distributed, for hvlike's own operations.

    Args:
        group: A group of the backend "hvlike"; None: the default group.

    Returns:
        The process set of the same ranks; `hvlike.global_process_set` for the default group.

    Raises:
        UsageError: For a group of another backend.
    """
    if group is None or group is dist.group.WORLD:
        return global_process_set
    calls = getattr(group, "calls", None)
    if not isinstance(calls, CallQueue):
        raise UsageError(
            f"expected a group of the backend 'hvlike', got {type(group).__name__}: make it with "
            "torch.distributed.new_group(ranks, backend='hvlike')."
        )
    return current().registry.sets[calls.group.number]

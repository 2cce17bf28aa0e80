"""Making a group of torch.distributed: a process set that its members make without the other ranks.

    meet       all members say that they are here; the first of them says when they all are, or who is missing
    enroll     the communicators between nodes, the op queues and the state of the process set
    calls      an op queue for the group's calls, in the order in which each member makes them

torch.distributed calls the creator on the members of a group only, and with use_local_synchronization the other ranks
do not even know of it. So these process sets have numbers that follow from the name of the group.

torch has dist.monitored_barrier for gloo, dist.split_group for nccl and _set_pg_timeout, which dist.breakpoint calls,
for both. They are replaced when the first group is made, by functions that ask whose group it is: for all others they
call torch's. Names that a program has imported from torch.distributed before stay torch's.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hvlike.backends.op_queue import OpQueue
from hvlike.collectives.health.departures import Errors
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.requests.process_set import FIRST_PRIVATE_SET, ProcessSet, global_process_set
from hvlike.collectives.session.context import Context, current
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import HorovodInternalError, StalledError, UsageError
from hvlike.system.system import of_process, system
from hvlike.torch_distributed.calls import CallQueue
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import Coroutine

if TYPE_CHECKING:
    from hvlike.torch_distributed.process_group import ProcessGroup

T = TypeVar("T")

_MARGIN_SECONDS = 5.0  # What a member waits longer than the first one, which then says who is missing


def open_group(name: str, ranks: Sequence[int], seconds: float) -> CallQueue:
    """Make a group on this rank, a member. Every member calls it. Blocks until all have, at most so many seconds.

    name: the same on all members, and not in use. ranks: of the job, in the order of the group.
    Raises: StalledError: It names the members that are missing. PeerLeftError: A member is lost.
    """
    context = current()
    loop = context.fabric.loop
    task = loop.start(_open(context, name, tuple(ranks), system.monotonic() + seconds), wake=False)

    def lose(errors: Errors) -> None:
        gone = [errors[rank] for rank in ranks if rank in errors]
        if gone:
            loop.cancel(task, gone[0])

    context.departures.listen(lose)
    try:
        loop.wait(lambda: task.done)
    finally:
        context.departures.ignore(lose)
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
    made = context.registry.made
    made[name] += 1
    set_state = yield from context.registry.enroll_members(private_number(f"{name} {made[name]}"), ranks)
    queue = yield from set_state.queues.take(-1)
    return set_state, queue


def private_number(name: str) -> int:
    """The number of the process set of a group, which no other has, nor has had. name: with how often it was made."""
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
        if system.monotonic() > deadline:
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

    def __init__(self) -> None:
        self.context: Context | None = None
        self.names = GroupNames()


_run = of_process(_Run)


def names() -> GroupNames:
    """The names of this run: a rank that takes part only since hvlike has started again knows of no earlier groups."""
    if _run.context is not current():
        _run.context, _run.names = current(), GroupNames()
    return _run.names


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


def extend_functions(kind: type[ProcessGroup]) -> None:
    """Have the functions of torch.distributed serve groups of this kind too. A second call does nothing."""
    of_torch = c10d.split_group, c10d.monitored_barrier, c10d._set_pg_timeout
    if hasattr(of_torch[0], "of_torch"):
        return

    @functools.wraps(of_torch[0])
    def split_group(parent_pg: Any = None, split_ranks: Any = None, *others: Any, **named: Any) -> Any:
        parent: Any = parent_pg or dist.group.WORLD
        split = _split if isinstance(parent, kind) else of_torch[0]
        return split(parent, split_ranks, *others, **named)

    @functools.wraps(of_torch[1])
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        of: Any = dist.group.WORLD if group is None else group
        (wait_for_members if isinstance(of, kind) else of_torch[1])(of, timeout, wait_all_ranks)

    @functools.wraps(of_torch[2])
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        of: Any = dist.group.WORLD if group is None else group
        if isinstance(of, kind):
            of.set_timeout(timeout)
        else:
            of_torch[2](timeout, group)

    for mine, its in zip((split_group, monitored_barrier, set_pg_timeout), of_torch, strict=True):
        mine.of_torch = its  # type: ignore[attr-defined]
        for module in (dist, c10d):
            if hasattr(module, its.__name__):
                setattr(module, its.__name__, mine)


def _split(
    parent: ProcessGroup,
    split_ranks: Sequence[Sequence[int]] | None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """The group of this rank's part, or None. split_ranks: places in the parent."""
    parts = [list(part) for part in split_ranks or ()]
    places = [place for part in parts for place in part]
    if not parts or not all(parts):
        raise UsageError(f"split_group: split_ranks must be parts of at least one rank each, got {split_ranks}.")
    if len(set(places)) < len(places) or not set(places) <= set(range(parent.size())):
        raise UsageError(
            f"split_group: split_ranks={split_ranks}: each of the {parent.size()} places in the parent, 0 to "
            f"{parent.size() - 1}, may stand in one part, once."
        )
    ranks = dist.get_process_group_ranks(parent)
    for part in parts:
        if parent.rank() in part:
            return dist.new_group(
                [ranks[place] for place in sorted(part)],
                timeout=timeout,
                backend=backend or dist.get_backend(parent),
                pg_options=pg_options,
                group_desc=group_desc or f"{parent.getGroupDesc()}:split",
                # The ranks of the parent call this, and perhaps no others.
                use_local_synchronization=True,
                sort_ranks=False,
            )
    return None


def wait_for_members(group: ProcessGroup, timeout: timedelta | float | None, wait_all_ranks: bool) -> None:
    """A monitored barrier: each member that has come in time learns from the first one who has not."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or group.calls.seconds
    running = current()
    loop = running.fabric.loop
    ranks = dist.get_process_group_ranks(group)
    key = (f"monitored_barrier {next(group.monitored_barriers)}", group.calls.name)
    task = loop.start(meet(running.fabric, ranks, key, system.monotonic() + seconds), wake=False)
    loop.wait(lambda: task.done)
    if task.error is not None:
        raise task.error
    if task.result:
        missing = task.result if wait_all_ranks else task.result[:1]
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        rank = running.world.rank
        # Words of gloo's, by which programs know the error.
        here = "timed out in monitoredBarrier"
        if rank != ranks[0]:
            here = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank "
            here += str(ranks[0])
        raise StalledError(
            f"[Rank {rank}]: {who} failed to pass monitoredBarrier in {round(1000 * seconds)} ms. Of the group with "
            f"{name_ranks(ranks)} these had not called it in time. Rank {rank} {here}."
        )

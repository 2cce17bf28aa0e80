"""barrier, and join: a rank without data lets the others go on.

A rank that has joined contributes neutral values until all ranks have joined; hvd.join() and the Join context share
`begin_join` and `end_join`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend
from hvlike.backends.op_queue import Job
from hvlike.backends.operation import Operation, synchronize
from hvlike.collectives.api.allreduce import allreduce_async
from hvlike.collectives.requests.join_protocol import JOIN_KEY, JoinEnd, JoinRequest, JoinScope, LeaveRequest
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.requests.request import RequestKey, RequestSpec
from hvlike.collectives.session.basics import rank
from hvlike.collectives.session.context import begin, current
from hvlike.collectives.session.joined_proxy import PersistentOperation
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.transport.loop.coroutine import Coroutine


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank of the set has called this.

    Collective: every rank of the set. Blocks. Operations of other names may be in flight meanwhile.

    Args:
        process_set: The ranks to run among. Default: all ranks.

    Raises:
        HorovodInternalError: PeerLeftError or ShutdownError, if a rank of the set has left; DeadlockError, if no rank
            can go on.

    Source: MPI 4.1 section 6.3; horovod.torch.barrier.
    """
    _, set_state, name, _, _ = begin("barrier", None, process_set)
    synchronize(set_state.controller.submit(RequestSpec("barrier"), name, [], lambda request: None, wake=False))


def set_away(set_state: ProcessSetState, away: bool, *, inline: bool = True) -> None:
    """This thread stands in for its rank, which has no more data, or no longer so. Local.

    Steps of other threads of this rank look closely from now on; with `inline` no rank tries inline calls.
    """
    set_state.proxies.set_thread(threading.get_ident() if away else None)
    set_state.plan_epoch.advance()
    if set_state.inline is not None and inline:
        set_state.inline.set_away(away)


def begin_join(
    set_state: ProcessSetState,
    planned: Sequence[PersistentOperation],
    names: frozenset[str],
    scope: JoinScope,
    how: str,
) -> Operation:
    """Say that this rank has no more data; the handle's result, a JoinEnd, is there when all have said so.

    planned: what the set has planned, from before `set_away`; the caller keeps it until `end_join`, as others count on
    its proxies. names: what this rank could plan anew.
    """
    proxies = set_state.proxies
    request = JoinRequest(
        set_state.controller.names.counts(),
        frozenset(each.serial for each in planned if each.serial is not None),
        proxies.spare_queues(),
        names,
        scope,
        how,
    )
    for each in planned:
        each.has_no_more_data()
    # First the proxies: what the others begin once they know of this rank needs them.
    current().fabric.loop.post(lambda: proxies.begin(planned), wake=False)
    return submit_join(set_state, JOIN_KEY, request, wake=False)


def submit_join(
    set_state: ProcessSetState,
    key: RequestKey,
    request: JoinRequest | LeaveRequest,
    ended: Callable[[Any], object] = lambda end: None,
    *,
    wake: bool = True,
) -> Operation:
    """Submit it; the handle's result is what all ranks derive from their requests, a JoinEnd or LeaveEnd.

    ended: called with that, in the queue like any other operation: what was agreed before has ended then.
    """

    def job(end: Any) -> Job:
        def run(backend: Backend) -> Coroutine[None]:
            ended(end)
            yield from ()

        return run

    spec = RequestSpec(key[0], detail=request)
    return set_state.controller.submit(spec, key[1], [], lambda request: request.outputs[0], wake=wake, job=job)


def end_join(set_states: list[ProcessSetState], ends: list[JoinEnd]) -> None:
    """Wait for the last step of every plan, the one without an active rank, and go on alike."""
    loop = current().fabric.loop
    pairs = list(zip(set_states, ends, strict=True))
    for set_state, end in pairs:
        set_state.controller.wait(JOIN_KEY, partial(set_state.proxies.settled, end.plans), None, certain=False)
    ended = Operation()
    devices: list[DeviceBackend] = []

    def end_all() -> None:
        error: BaseException | None = None
        for set_state, end in pairs:
            error = error or set_state.proxies.error()
            devices.extend(set_state.proxies.end(end.plans, end.spare_queues))
        ended.end(error)

    loop.post(end_all, wake=False)
    loop.wait(ended.done)
    for device in devices:
        device.fence()()
    error = ended.error
    if error is not None:
        raise error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error)) from error


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks say so.

    Collective: every rank of the job calls it. Blocks. Meanwhile this rank is neutral in what the others do: it
    contributes the identity of the op to allreduce and grouped allreduce (zeros to the gradients of optimizers; Average
    still divides by all ranks) and counts as arrived in barriers. Other collectives raise HorovodInternalError on the
    active ranks; the job goes on. Afterwards the ranks count unnamed operations from the same number.

    Args:
        device: Accepted for compatibility with Horovod and ignored.

    Returns:
        The rank that joined last, the same on all ranks; if it has missed a step of an optimizer, one that has not.

    Raises:
        UsageError: Between backward and step, and inside a Join context.
        HorovodInternalError: PeerLeftError or ShutdownError, if a rank has left.

    Example:
        >>> for batch in batches:  # some ranks have fewer
        ...     train(batch)
        >>> hvd.join()

    Source: horovod.torch.join.
    """
    context = current()
    set_states = [context.registry.set_states[number] for number in sorted(context.registry.set_states)]
    for set_state in set_states:
        if set_state.rounds.inside:
            raise UsageError("hvd.join() inside a Join context, which does the same at its end. Leave it first.")
    planned = [set_state.proxies.planned for set_state in set_states]
    names = [set_state.proxies.names() for set_state in set_states]
    try:
        for set_state in set_states:
            set_away(set_state, True)
            set_state.proxies.check_idle("hvd.join()")
        handles = [
            begin_join(set_state, plans, mine, JoinScope.EVERYTHING, "called hvd.join()")
            for set_state, plans, mine in zip(set_states, planned, names, strict=True)
        ]
        ends: list[JoinEnd] = [handle.result() for handle in handles]
        end_join(set_states, ends)
    except HorovodInternalError:
        for set_state in set_states:
            context.fabric.loop.post(set_state.proxies.give_up, wake=False)
        raise
    finally:
        for set_state in set_states:
            set_away(set_state, False)
    missed = max(set_state.proxies.missed for set_state in set_states)
    return find_common_rank("hvd.join", missed, ends[0].last, global_process_set, prefers_last=True)[0]


def find_common_rank(
    name: str, missed: int, last: int, process_set: ProcessSet, *, prefers_last: bool = False
) -> tuple[int, bool]:
    """Agree on a rank that has missed no step, and on whether any rank has missed one. Collective over the set; blocks.

    It is the highest one. last: the rank whose request came last; it counts where all have missed a step, and with
    `prefers_last` if it has missed none. That is not certain: planned steps send no message, so a request may be late.
    missed: how many steps this rank has stood in for.

    Source: torch.nn.parallel.DistributedDataParallel, `_find_common_rank`.
    """
    ranks = process_set.ranks or []
    priority = ranks.index(rank()) + len(ranks) * (prefers_last and rank() == last)
    mine = torch.tensor([-1 if missed else priority, int(missed > 0)], device="cpu")
    found, some = allreduce_async(mine, name=f"{name}.common rank", op=ReduceOp.MAX, process_set=process_set).result()
    return (last if found < 0 else ranks[int(found) % len(ranks)]), bool(some)

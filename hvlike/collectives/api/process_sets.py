"""add_process_set and remove_process_set: collective over all ranks, agreed like any request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvlike.backends.base import Backend
from hvlike.backends.operation import synchronize
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.requests.request import RequestSpec
from hvlike.collectives.session.context import current
from hvlike.collectives.session.process_set_state import ranks_of, what_is_wrong
from hvlike.errors import UsageError, WrongTypeError
from hvlike.transport.loop.coroutine import Coroutine

KIND = "process_set"


def add_process_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    """Register a process set after init().

    Collective: every rank of the job calls it, members of the set and others, in the same order. Blocks until done.

    Args:
        process_set: A ProcessSet, ranks of the job, or an mpi4py communicator of some of them; the same on every rank.

    Returns:
        The registered set.

    Raises:
        UsageError: On every rank, for a set that is registered already or names ranks that the job does not have (a
            ValueError).
        MismatchError: On every rank, when the ranks pass different sets.

    Example:
        >>> even = hvd.add_process_set([0, 2])

    Source: horovod.torch.add_process_set; HOROVOD_DYNAMIC_PROCESS_SETS is not needed here.
    """
    context = current()
    registry = context.registry
    added = global_process_set
    ranks: list[int] = []
    wrong: str | None = None
    try:
        added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        ranks = ranks_of(added.mpi_comm, context.world) if added.ranks is None else added.ranks
        wrong = what_is_wrong(ranks, [each.ranks or [] for each in registry.shared_sets()], context.world.size)
    except UsageError as error:
        # Told to the others all the same: they wait for this rank.
        wrong = str(error)

    def enroll() -> Coroutine[None]:
        added.ranks = list(ranks)
        return registry.enroll(added)

    _agree("add", (tuple(ranks), wrong is None), enroll)
    if wrong is not None:
        raise UsageError(f"add_process_set: {wrong}")
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; its unfinished operations fail with ShutdownError.

    Collective: every rank of the job calls it, members of the set and others, in the same order. Blocks until done.

    Args:
        process_set: A registered set. Its `process_set_id` becomes None.

    Returns:
        True; False for the global set and for one that is not registered.

    Raises:
        MismatchError: On every rank, when the ranks pass different sets.

    Source: horovod.torch.remove_process_set.
    """
    registry = current().registry
    if not isinstance(process_set, ProcessSet):
        raise WrongTypeError(f"remove_process_set: expected a ProcessSet, got {type(process_set).__name__}.")
    possible = process_set is not global_process_set and registry.is_registered(process_set)
    _agree("remove", (tuple(process_set.ranks or ()), possible), lambda: registry.dismiss(process_set))
    return possible


def _agree(what: str, detail: tuple[tuple[int, ...], bool], work: Callable[[], Coroutine[None]]) -> None:
    def run(backend: Backend) -> Coroutine[None]:
        if detail[1]:
            yield from work()

    set_state = current().find_set(None, f"{what}_process_set")
    name = set_state.controller.names.next(KIND)
    spec = RequestSpec(KIND, detail=(what, *detail))
    submit = set_state.controller.submit
    synchronize(submit(spec, name, [], lambda request: None, wake=False, job=lambda agreed: run))

"""`ProcessSet`: the ranks that an operation runs in, as the user names them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from hvlike.errors import UsageError
from hvlike.system.system import of_process
from hvlike.untraced import traced


class _Registered:
    """The sets that this rank has registered."""

    def __init__(self) -> None:
        self.by_ranks: dict[tuple[int, ...], ProcessSet] = {}


_registered = of_process(_Registered)

FIRST_PRIVATE_SET = 1 << 32  # Sets from this number on were made by their members: other ranks do not know them


class ProcessSet:
    """A set of ranks of the job; pass it as `process_set=` to any operation once it is registered.

    `init(process_sets=[...])` and `add_process_set` register it and give it a `process_set_id`; until then that is
    None.

    Args:
        ranks_or_comm: Ranks of the job in any order, or an mpi4py communicator of them.

    Raises:
        UsageError: For anything else, a negative rank or one named twice (a ValueError).

    Source: horovod.torch.ProcessSet.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = _checked(ranks_or_comm)
        self._me = -1

    def registered(self, number: int, ranks: Sequence[int], me: int) -> None:
        """Called when the set is registered.

        Args:
            number: The `process_set_id`.
            ranks: The ranks of the set, in rising order.
            me: The rank of this process in the job.
        """
        self.process_set_id, self.ranks, self._me = number, list(ranks), me
        if number < FIRST_PRIVATE_SET:
            _registered.by_ranks[tuple(ranks)] = self

    def removed(self) -> None:
        """Called when the set is removed or hvlike shut down."""
        self.process_set_id = None
        if self.ranks is not None and _registered.by_ranks.get(tuple(self.ranks)) is self:
            del _registered.by_ranks[tuple(self.ranks)]

    @traced
    def size(self) -> int | None:
        """How many ranks the set has; None until it is registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    @traced
    def rank(self) -> int | None:
        """Position of this rank in the set; None until it is registered.

        Raises: UsageError (a ValueError) on a rank that is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if self._me not in self.ranks:
            raise UsageError(f"Process is not part of provided process set. Rank {self._me} is not among {self.ranks}.")
        return self.ranks.index(self._me)

    @traced
    def included(self) -> bool | None:
        """True on the ranks of the set; None until it is registered."""
        return None if self.process_set_id is None or self.ranks is None else self._me in self.ranks

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as its ranks; read back where a set of these ranks is registered, it is that set."""
        return _restore, (self.ranks,)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def _restore(ranks: list[int]) -> ProcessSet:
    return _registered.by_ranks.get(tuple(ranks)) or ProcessSet(ranks)


def _checked(ranks: Any) -> list[int]:
    text = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
    if isinstance(ranks, (str, bytes)):
        raise UsageError(f"{text}, got {ranks!r}.")
    try:
        values = sorted(operator.index(rank) for rank in ranks)
    except TypeError as error:
        raise UsageError(f"{text}, got {ranks!r}.") from error
    if not values or values[0] < 0 or len(set(values)) < len(values):
        raise UsageError(f"{text}: not empty, none negative, none twice; got {values}.")
    return values


global_process_set = of_process(partial(ProcessSet, [0]))
"""All ranks; what an operation without `process_set=` runs among."""

"""What every backend can do, and the backend of a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.transport.loop.coroutine import Coroutine


class Prepared(Protocol):
    """A reduction of tensors of given lengths, ready to run over and over."""

    def run(self, addresses: list[int], active: bool = True, tensors: Sequence[torch.Tensor] = ()) -> Coroutine[int]:
        """Reduce the tensors that begin at these addresses of host memory, in place; returns how many ranks are active.

        The tensors are dense and of the dtype of the reduction; the caller holds them. All ranks run the same, in the
        same order. active: this rank has tensors of its own, not zeros for one that has joined. tensors: these; they
        live on if a rank gives up while a peer may write to them.
        """


class Backend(Protocol):
    """Reduces and moves flat contiguous tensors among the ranks of a group, one call at a time, in the same order."""

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce in place; the same lengths on every rank; bitwise the same result everywhere."""

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Prepared | None:
        """What reduces tensors of these lengths where they are, short ones too; none of them is empty.

        The same on every rank. None where the backend has no such way.
        """

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Reduce each tensor on the rank `owners[i]` of the group, in place; the others' are only read."""

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """Write each tensor of bytes from the rank `owners[i]` of the group to all others."""

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Send `sends[i]` to position i of the group and fill `receives[i]` from there; the own part is copied.

        Tensors of bytes, of any length, also 0; what one position sends is as long as what the other receives.
        """

    def begin_count(self, *, active: bool) -> None:
        """Say whether this rank is active, for `end_count` after other work. Does not wait."""

    def end_count(self) -> Coroutine[int]:
        """How many ranks are active, as they said at `begin_count`."""

    def close(self) -> None:
        """Give back what the backend holds."""


class SoloBackend:
    """A group of one rank: only the factors are left to apply."""

    _active = False

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> None:
        """See Backend: there is nothing to prepare."""

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Apply the factors in place."""
        for tensor in tensors:
            arithmetic.combine(arithmetic.view(tensor), [])
        yield from ()

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Apply the factors in place: all is owned here."""
        yield from self.allreduce(tensors, arithmetic)

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """Nobody else wants it."""
        yield from ()

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Copy the own part."""
        receives[0].copy_(sends[0])
        yield from ()

    def begin_count(self, *, active: bool) -> None:
        """Remember it."""
        self._active = active

    def end_count(self) -> Coroutine[int]:
        """1 or 0."""
        yield from ()
        return int(self._active)

    def close(self) -> None:
        """Nothing is held."""

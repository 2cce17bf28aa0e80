"""What every backend can do, and the backend of a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.views import Bundle
from hvlike.transport.loop.coroutine import Coroutine


class Bundling(Protocol):
    """A plane that reduces bundles of small tensors without a buffer for all of them."""

    def bundle_elements(self, total: int, itemsize: int) -> int:
        """How many elements a bundle may hold, where all bundles of a reduction hold `total`."""

    def allreduce_bundles(
        self, bundles: Sequence[Bundle], tensors: Sequence[torch.Tensor], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Reduce in place what the bundles hold, and flat tensors beside them; on every rank the same, bitwise."""


class Repeating(Protocol):
    """A reduction of tensors of the same lengths, over and over."""

    def allreduce(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> Coroutine[None]:
        """Reduce in place, whatever the shapes, none empty; each of the dtype and dense, its elements in one order.

        addresses: where the tensors begin in host memory.
        """


class Backend(Protocol):
    """Reduces and moves flat contiguous tensors among the ranks of a group, one call at a time, in the same order."""

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce in place; the same lengths on every rank; bitwise the same result everywhere."""

    @property
    def bundling(self) -> Bundling | None:
        """What reduces bundles; None where a buffer for all small tensors serves better."""

    def repeated(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Repeating | None:
        """What reduces tensors of these lengths where they are, short ones too; None where that is not the way.

        The same on every rank.
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
        """How many ranks have said at `begin_count` that they are active."""

    def close(self) -> None:
        """Give back what the plane holds."""


class SoloBackend:
    """A group of one rank: only the factors are left to apply."""

    bundling: Bundling | None = None
    _active = False

    def repeated(self, lengths: Sequence[int], arithmetic: Arithmetic) -> None:
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

"""What a ZeroRedundancyOptimizer does in a Join context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvlike.collectives.objects import broadcast_object
from hvlike.training.joining.joinable import BuiltInHook
from hvlike.training.zero import misuse
from hvlike.training.zero.options import copy_options, options_of

if TYPE_CHECKING:
    from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer
    from hvlike.training.zero.steps import Steps


class ZeroHook(BuiltInHook):
    """A rank that is out of data goes on updating its share, in the loop (steps.py); so no shadowed iteration is left.

    Afterwards all ranks have the options of one that has seen all iterations.
    """

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, steps: Callable[[], Steps], *, divides_by_active: bool
    ) -> None:
        """steps: those of now; a parameter group that is added replaces them."""
        self._optimizer = optimizer
        self._steps = steps
        self._divides_by_active = divides_by_active

    def begin(self) -> None:
        """See BuiltInHook."""
        self._steps().divides_by_active = self._divides_by_active

    def leave(self) -> None:
        """See BuiltInHook."""
        if self._steps().is_reduced:
            raise misuse.joined_before_step()
        self._optimizer.is_absent = True

    def abandon(self) -> None:
        """See BuiltInHook."""
        self._end()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the options of one that has made all steps. Collective; blocks."""
        self._end()
        optimizer = self._optimizer
        if self.context.absent:
            options = options_of(optimizer.param_groups)
            told = broadcast_object(options, self.context.authority, process_set=optimizer.process_set)
            copy_options(told, optimizer.param_groups)
            copy_options(told, optimizer.optim.param_groups)

    def _end(self) -> None:
        self._steps().divides_by_active = False
        self._steps().is_reduced = False
        self._optimizer.is_absent = False

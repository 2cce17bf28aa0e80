"""What a DistributedDataParallel does in a Join context."""

from __future__ import annotations

from collections.abc import Callable

from hvlike.training.ddp.module_gradients import ModuleGradients
from hvlike.training.joining.joinable import BuiltInHook


class DataParallelHook(BuiltInHook):
    """Others' reductions and buffers are stood in for in the loop; afterwards all ranks take over one rank's module.

    Where the user's own hook reduces, only that hook can take part, so it is called with zeros in each iteration.
    """

    def __init__(
        self,
        gradients: ModuleGradients,
        take_over: Callable[[int], None],
        reduces_now: Callable[[bool], bool],
        *,
        divide_by_active: bool,
    ) -> None:
        """take_over: gives all ranks the module of one, by its rank in the job. reduces_now: see `main_hook`.

        divide_by_active: average over the ranks that have inputs, else over all.
        """
        self._gradients = gradients
        self._take_over = take_over
        self._reduces_now = reduces_now
        self._divide_by_active = divide_by_active
        self.rides = gradients.hook is None

    def begin(self) -> None:
        """See BuiltInHook."""
        self._gradients.prepare()
        self._gradients.divides_by_active = self._divide_by_active

    def main_hook(self) -> None:
        """With a hook of the user: ask whether the others' backward pass of this iteration reduces, and take part."""
        if self._gradients.hook is not None and self._reduces_now(False):
            self._gradients.reduce_zeros()

    def abandon(self) -> None:
        """See BuiltInHook."""
        self._gradients.divides_by_active = False
        self._gradients.abandon()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters and buffers of one that has made all steps. Collective; blocks."""
        self._gradients.divides_by_active = False
        self._take_over(self.context.authority)

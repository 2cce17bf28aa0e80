"""What a DistributedOptimizer does in a Join context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parameter import UninitializedParameter

from hvlike.collectives.api.objects import broadcast_object
from hvlike.training import usage_errors
from hvlike.training.gradients.grad_state import Phase
from hvlike.training.gradients.gradients import Gradients
from hvlike.training.gradients.parameters import copy_options, options_of
from hvlike.training.join.joinable import BuiltInHook
from hvlike.training.state.broadcast import broadcast_optimizer_state, broadcast_tensors, named_tensors

if TYPE_CHECKING:
    from hvlike.training.optimizer_wrapper import DelegatingOptimizer


class OptimizerJoinHook(BuiltInHook):
    """Proxies take part in the steps of other ranks, in the loop; afterwards all ranks take over one rank's state."""

    def __init__(self, optimizer: DelegatingOptimizer, gradients: Gradients, *, divide_by_active: bool) -> None:
        """Local. With `divide_by_active` averages are over the ranks that have inputs, else over all."""
        self._optimizer = optimizer
        self._gradients = gradients
        self._divide_by_active = divide_by_active

    def begin(self) -> None:
        """See BuiltInHook."""
        self._gradients.prepare()
        self._gradients.divides_by_active = self._divide_by_active

    def leave(self) -> None:
        """See BuiltInHook."""
        if self._gradients.phase is Phase.REDUCING:
            raise usage_errors.joined_while_reducing()

    def abandon(self) -> None:
        """See BuiltInHook."""
        self._gradients.divides_by_active = False
        self._gradients.abandon()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters, state and options of one that has made all steps. Collective; blocks."""
        self._gradients.divides_by_active = False
        if not self.context.absent:
            return
        root, process_set = self.context.authority, self._gradients.reduction.process_set
        groups = self._optimizer.wrapped.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        initialised = [each for each in parameters if not isinstance(each, UninitializedParameter)]
        broadcast_tensors("Join", named_tensors(initialised), root, process_set)
        if not self._gradients.reduction.of_deltas:
            broadcast_optimizer_state(self._optimizer, root, process_set=process_set)
            return
        # The optimizers of the ranks keep their own states.
        copy_options(broadcast_object(options_of(groups), root, process_set=process_set), groups)

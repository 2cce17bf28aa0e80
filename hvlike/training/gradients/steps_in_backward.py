"""Programs that step inside of backward: their hooks use a gradient before it is reduced, and the ranks would part.

They are refused: torch runs hooks of a tensor (register_post_accumulate_grad_hook) before those of its node, which see
when a gradient is there to be reduced.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor

from hvlike.training.gradients.grad_state import GradState, node_of
from hvlike.training.gradients.usage_errors import optimizer_in_backward
from hvlike.untraced import untraced


def refuse_optimizer_in_backward(name: str, parameter: Tensor) -> None:
    """Raise UsageError for what torch.distributed.optim._apply_optimizer_in_backward was applied to. Local."""
    if hasattr(parameter, "_in_backward_optimizers"):
        raise optimizer_in_backward(name)


class StepWatch:
    """Tells its owner of hooks that step on a gradient or take it away; costs nothing where a parameter has no hook.

    Calls `owner.used_in_backward(slot)`, in backward. Holds the owner only weakly, as GradientHooks does.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self._nodes: dict[int, Any] = {}

    def look_at(self, slot: GradState) -> None:
        """Watch the parameter, if it has hooks. Local."""
        parameter: Any = slot.parameter
        refuse_optimizer_in_backward(slot.name, parameter)
        if not parameter._post_accumulate_grad_hooks:
            return
        node = node_of(parameter)
        if node is None or self._nodes.get(id(parameter)) is node:
            return
        self._nodes[id(parameter)] = node
        versions: list[int] = []
        node.register_prehook(partial(_note_version, parameter, versions))
        node.register_hook(partial(_compare, self._owner, slot, versions))


@untraced
def _note_version(parameter: Tensor, versions: list[int], _: Any) -> None:
    versions[:] = [parameter._version]


@untraced
def _compare(reference: weakref.ref[Any], slot: GradState, versions: list[int], _: Any, incoming: Any) -> None:
    """After the program's hooks: the gradient is there, and the parameter is what it was."""
    owner, parameter = reference(), slot.parameter
    if owner is None or slot.index < 0:
        return
    # What was frozen since forward accumulates nothing.
    taken = parameter.grad is None and incoming[0] is not None and parameter.requires_grad
    if taken or versions != [parameter._version]:
        owner.used_in_backward(slot)

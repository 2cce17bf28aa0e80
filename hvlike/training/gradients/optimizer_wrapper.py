"""For optimizers that wrap another one: delegation, the loss of all ranks, and GradScalers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.training.gradients.adasum_deltas import AdasumDeltas
from hvlike.training.gradients.grad_state import declared_dtype
from hvlike.training.gradients.gradients import Gradients
from hvlike.training.gradients.reduction import Reduction


class DelegatingOptimizer(Optimizer):
    """A torch.optim.Optimizer that has only the one it wraps.

    Optimizer's own constructor is not called: it would make groups and state of its own. Every attribute that is not
    in `own_attributes` is read, set and deleted on the wrapped optimizer, so that a GradScaler's `grad_scale` reaches
    it, and hooks registered here run there, once. Methods are those of this class and its subclasses.
    """

    own_attributes: ClassVar[frozenset[str]] = frozenset({"_wrapped", "step"})
    """Attributes of this object. LRScheduler replaces `step` on the object it is given."""

    _wrapped: Optimizer
    _gradients: Gradients | AdasumDeltas

    @property
    def wrapped(self) -> Optimizer:
        return self._wrapped

    @property
    def _reduction(self) -> Reduction:
        return self._gradients.reducers.reduction

    def before_groups_are_read(self) -> None:
        """Called when `param_groups` is read, two frames below the reader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer. Local."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this or of a plain optimizer. Local; all ranks load before the next step, or one does
        and broadcast_optimizer_state follows.

        Args:
            state_dict: What state_dict() of this or of the wrapped optimizer has returned.
        """
        self._wrapped.load_state_dict(state_dict)

    def local_state_dict(self) -> dict[str, Any]:
        """Return what only this rank has, for elastic.TorchState: the state with op=Adasum, else nothing. Local."""
        if not self._reduction.of_deltas:
            return {}
        ranks = self._reduction.process_set or global_process_set
        number, place = (ranks.process_set_id, ranks.rank()) if ranks.included() else (None, None)
        return {"process_set": number, "rank": place, "optimizer": self._wrapped.state_dict()}

    def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
        """Go on from a commit, with the ranks there are now. For elastic.TorchState, after load_state_dict. Local.

        With op=Adasum, whose ranks have states of their own, with that of the earlier rank of this rank's number.

        Args:
            states: What local_state_dict() has returned on all ranks, by rank; with as many ranks as now on this one.
                Empty: this rank keeps what it has.
            ranks_before: How many ranks there were; 0: there was no commit.
        """
        ranks = self._reduction.process_set or global_process_set
        if not self._reduction.of_deltas or not ranks.included():
            return
        for state in states.values():
            if (state["process_set"], state["rank"]) == (ranks.process_set_id, ranks.rank()):
                self._wrapped.load_state_dict(deepcopy(state["optimizer"]))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        self.before_groups_are_read()
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = value

    @property  # type: ignore[misc]  # typeshed has a setter, which makes no sense here
    def __class__(self) -> type:
        """The class of the wrapped optimizer: code asks isinstance(optimizer, torch.optim.SGD)."""
        wrapped = self.__dict__.get("_wrapped")
        return type(self) if wrapped is None else type(wrapped)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask before there is a wrapped optimizer: without the check they would recurse for ever.
        if name in self.own_attributes:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.own_attributes or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.own_attributes:
            object.__delattr__(self, name)
        else:
            delattr(self._wrapped, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped!r})"


def reduce_loss(loss: Any, op: ReduceOp, process_set: ProcessSet | None) -> Any:
    """Return the loss of all ranks for this rank's: a number, or a tensor of one element; other results as they are.

    L-BFGS decides by the loss how often it calls the closure, and must decide the same on every rank.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        reduced = allreduce(loss.detach().to(torch.float64), op=op, process_set=process_set)
        return reduced.to(loss.dtype)
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        return float(allreduce(torch.tensor(loss, dtype=torch.float64, device="cpu"), op=op, process_set=process_set))
    return loss


def reading_grad_scaler() -> GradScaler | None:
    """Return the GradScaler a method of which is reading `param_groups`, None for other readers.

    A GradScaler searches the gradients for infinities before it calls `optimizer.step()`, and skips that call when it
    finds one. Gradients that are not reduced yet would let one rank skip the step while others wait in theirs. It has
    no hook for this; the first thing it does is read `optimizer.param_groups`.
    """
    # Frames: this function, before_groups_are_read, param_groups, the reader.
    try:
        reader = sys._getframe(3)
    except ValueError:
        return None
    scaler = reader.f_locals.get("self")
    return scaler if isinstance(scaler, GradScaler) else None


class ScalerLook:
    """A GradScaler looks for infinities in reduced gradients of which each rank holds some.

    It finds one on all ranks or on none: a gradient of this rank becomes infinite where one of any rank is. On a rank
    that holds none a tensor stands for it, until the look ends: the step shall not take that for a gradient.
    """

    def __init__(self, parameter: Tensor, *, is_infinite: bool) -> None:
        self._stand_in: Tensor | None = None
        self._parameter = parameter
        if parameter.grad is None:
            self._stand_in = torch.zeros_like(parameter, dtype=declared_dtype(parameter), requires_grad=False)
            parameter.grad = self._stand_in
        if is_infinite:
            parameter.grad.fill_(torch.inf)

    def end(self) -> None:
        """Take away what stands for a gradient."""
        if self._stand_in is not None and self._parameter.grad is self._stand_in:
            self._parameter.grad = None

"""The gradient of one parameter between backward and step: the hook that sees it arrive, and its state since.

Autograd ends each parameter's path in an AccumulateGrad node. A hook on that node runs after the gradient has been
added to `parameter.grad`, once in each backward pass, however often the parameter is used in the graph.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from hvlike.training.gradients.ownership import Claim
from hvlike.transport.memory.own_memory import check_parameter
from hvlike.untraced import untraced


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of its gradient, which may be another one: `parameter.grad_dtype`, since torch 2.10."""
    gradient = parameter.grad if parameter.is_leaf else None
    return declared_dtype(parameter) if gradient is None else gradient.dtype


def declared_dtype(parameter: Tensor) -> torch.dtype:
    """The same before there is a gradient. A `grad_dtype` of None allows any: that of the parameter is likely."""
    return (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype


class Phase(enum.Enum):
    """Where the gradients are."""

    IDLE = "no backward pass since the last step or zero_grad"
    ACCUMULATING = "local sums of some backward passes, more are to come"
    REDUCING = "some gradients are being reduced over the ranks"
    SYNCHRONIZED = "all gradients are reduced"


def node_of(parameter: Tensor) -> Any:
    """Return the AccumulateGrad node of a parameter; None where it requires no gradient."""
    if not parameter.is_leaf or not parameter.requires_grad or isinstance(parameter, UninitializedParameter):
        return None
    with torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    return None if function is None else function.next_functions[0][0]


class GradientHooks(Claim):
    """The hooks of one owner, on parameters that no other wrapper holds; they end with this object.

    A node lives only as long as somebody holds it: without the reference kept here the hooks would silently never
    run. A node also keeps its hooks alive outside of the garbage collector's sight, so a hook may hold the owner
    only weakly, or neither would ever be freed.
    """

    def __init__(self, owner: Any, on_gradient: Callable[[Any, Any], None], wrapper: str = "owner") -> None:
        super().__init__(wrapper)
        self._owner = weakref.ref(owner)
        self._on_gradient = on_gradient
        self._attached: dict[int, tuple[Any, RemovableHandle]] = {}

    def attach(self, parameter: Tensor, key: Any) -> None:
        """Call `on_gradient(owner, key)` whenever the gradient of `parameter` is done; replaces an earlier hook."""
        self.detach(parameter)
        node = node_of(parameter)
        if node is None or id(parameter) in self.lost:
            return
        hook = partial(_gradient_is_done, self._owner, self._on_gradient, key)
        self._attached[id(parameter)] = node, node.register_hook(hook)

    def detach(self, parameter: Tensor) -> None:
        _, handle = self._attached.pop(id(parameter), (None, None))
        if handle is not None:
            handle.remove()

    def _lose(self, key: int) -> None:
        super()._lose(key)
        self.detach(self.lost[key])
        owner = self._owner()
        if owner is not None:
            owner.has_lost()

    def node(self, parameter: Tensor) -> Any:
        """Return the AccumulateGrad node of a parameter that has a hook; None for others."""
        node, _ = self._attached.get(id(parameter), (None, None))
        return node

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._attached

    def __len__(self) -> int:
        return len(self._attached)


@untraced
def _gradient_is_done(reference: weakref.ref[Any], on_gradient: Callable[[Any, Any], None], key: Any, *_: Any) -> None:
    """Holds nothing that leads back to the node. A weak reference is five times faster to follow than a weak method."""
    owner = reference()
    if owner is not None:
        on_gradient(owner, key)


@dataclass(eq=False, slots=True)
class GradState:
    name: str
    parameter: Tensor
    index: int = -1  # Its place in the reducer's list; -1 when it is not reduced
    passes: int = 0  # Backward passes since the last step that reached it, those under no_sync() left out
    reached: bool = False  # By a pass since the last reduction; only DistributedDataParallel sets it
    handed_over: Tensor | None = None  # What is being reduced; must still be the parameter's after that
    version: int = 0  # How often torch had changed the gradient in place when it was handed over
    wire: Tensor | None = None  # The tensor that is reduced, where that is not the gradient itself
    sparse_dimensions: int = 0  # Of the last sparse gradient seen; 0 for none
    dtype: torch.dtype = field(init=False)  # Of the gradient
    device: torch.device = field(init=False)
    is_frozen: bool = field(init=False)  # Made for a gradient that a frozen parameter holds, and so without a hook
    rests: bool = False  # The parameter was frozen when the program's changes were followed last
    was_trained: bool = False  # In the last reduction: passes since may have left it sums, on some ranks only

    def __post_init__(self) -> None:
        self.dtype = gradient_dtype(self.parameter)
        self.device = self.parameter.device
        self.is_frozen = not self.parameter.requires_grad
        check_parameter(f"parameter {self.name!r}", self.parameter)

    def still_fits(self, parameter: Tensor) -> bool:
        """True for the same parameter, unless it was moved by `model.to(...)` or thawed since."""
        return (
            self.parameter is parameter
            and self.dtype is gradient_dtype(parameter)
            and self.device == parameter.device
            and not (self.is_frozen and parameter.requires_grad)
        )

    @property
    def was_changed(self) -> bool:
        """Unknown, and so not said, of gradients that are views of one tensor: torch counts their changes together."""
        gradient = self.handed_over
        if gradient is None or gradient._version == self.version or gradient._is_view():
            return False
        # Views that autograd makes (of a torch.cat, say) do not say so.
        return gradient.layout is not torch.strided or gradient.untyped_storage().nbytes() <= gradient.nbytes

    def to_reduce(self, gradient: Tensor, *, densify: bool) -> Tensor:
        """Return what stands for `gradient` in the reduction, the same in the whole step; shares memory if possible."""
        if self.wire is not None:
            return self.wire
        if gradient.layout is torch.strided:
            return gradient.detach() if gradient.requires_grad else gradient
        gradient = gradient.detach()
        self.sparse_dimensions = gradient.sparse_dim()
        if not densify:
            return gradient
        self.wire = gradient.to_dense()
        return self.wire

    def nothing(self) -> Tensor:
        """What stands for a gradient that is not there: zeros, of its dtype and layout."""
        parameter, dtype = self.parameter, gradient_dtype(self.parameter)
        if not self.sparse_dimensions:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        shape = tuple(parameter.shape)
        return torch.sparse_coo_tensor(
            torch.empty((self.sparse_dimensions, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *shape[self.sparse_dimensions :]), dtype=dtype, device=parameter.device),
            shape,
            check_invariants=False,
            device=parameter.device,
        )

    def take_back(self, reduced: Tensor | None) -> None:
        gradient = self.parameter.grad
        if gradient is not None and gradient.is_sparse:
            self.sparse_dimensions = gradient.sparse_dim()
        if reduced is None:
            reduced = self.wire
        if reduced is not None and reduced.layout is torch.strided and self.sparse_dimensions:
            # The layout the optimizer asked for by its choice of module: SparseAdam takes no dense gradients.
            reduced = reduced.to_sparse(self.sparse_dimensions)
        if reduced is not None:
            self.parameter.grad = reduced


def reset(slots: Sequence[GradState]) -> bool:
    """Begin a step; returns what `note_reduced` does."""
    for slot in slots:
        slot.passes = 0
        slot.reached = False
        slot.handed_over = None
        slot.wire = None
    return note_reduced(slots)


def note_reduced(slots: Sequence[GradState]) -> bool:
    """All were reduced. Whether a frozen one was so for the last time: what is reduced may change then."""
    last = False
    for slot in slots:
        last = last or (slot.rests and slot.was_trained)
        slot.was_trained = not slot.rests
    return last


@untraced
class OneHook:
    """One hook a step instead of one for each parameter, where nothing is reduced before the step.

    Then nobody needs to know when a gradient arrives, only which have arrived. The parameter whose gradient arrives
    last is likely to be reached by every backward pass. Its hook has all gradients looked at when the pass has ended.
    """

    def __init__(self, hooks: GradientHooks) -> None:
        self.slot: GradState | None = None  # The one that has a hook; None while each parameter has one
        self.seen: list[Tensor | None] | None = None  # Gradients after the newest backward pass, until taken
        self._hooks = hooks
        self._nodes: list[Any] = []  # Without them autograd would make new ones, for parameters of any shape

    def begin(self, slots: Sequence[GradState], last: int) -> None:
        self.slot = slots[last]
        self._nodes = [self._hooks.node(slot.parameter) for slot in slots]
        for slot in slots:
            if slot is not self.slot:
                self._hooks.detach(slot.parameter)

    def end(self, slots: Iterable[GradState]) -> None:
        alone, self.slot = self.slot, None
        self.seen = None
        if alone is not None:
            for slot in slots:
                if slot is not alone:
                    self._hooks.attach(slot.parameter, slot)
        self._nodes = []

    def look_at_the_end(self, parameters: Sequence[Tensor]) -> None:
        """Look at the gradients of these when the backward pass that is under way has ended."""

        def look() -> None:
            if self.slot is not None:
                self.seen = list(map(gradient_of, parameters))

        _engine.queue_callback(look)


gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_engine: Any = torch.autograd.Variable._execution_engine


def are_those(seen: Sequence[Tensor | None], gradients: Iterable[Tensor | None]) -> bool:
    return all(map(is_, seen, gradients)) and all(map(is_not, seen, repeat(None)))

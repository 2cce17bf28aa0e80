"""One parameter of a distributed optimizer or module and where its gradient is on its way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter


@dataclass(eq=False, slots=True)
class Slot:
    """What is known of one parameter between two steps."""

    name: str
    parameter: Tensor
    index: int = -1
    """Its place in the reducer's list; -1 when it is not reduced."""
    passes: int = 0
    """Backward passes since the last step that reached it, those under no_sync() left out."""
    reached: bool = False
    """Some backward pass since the last reduction has reached it, for those who want to know."""
    handed_over: Tensor | None = None
    """The gradient that was given away to be reduced; it must still be there when that is done."""
    version: int = 0
    """How often torch had changed the gradient in place when it was handed over."""
    wire: Tensor | None = None
    """What is really reduced, where that is not the gradient itself."""
    sparse_dimensions: int = 0
    """Of the last sparse gradient seen; 0 for none."""
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)
    is_lazy: bool = field(init=False)
    """Made while the parameter had no shape yet (lazy modules)."""

    def __post_init__(self) -> None:
        self.dtype = self.parameter.dtype
        self.device = self.parameter.device
        self.is_lazy = isinstance(self.parameter, UninitializedParameter)

    def still_fits(self, parameter: Tensor) -> bool:
        """True for the same parameter, not moved by `model.to(...)` and not initialised only since."""
        return (
            self.parameter is parameter
            and self.dtype is parameter.dtype
            and self.device == parameter.device
            and not (self.is_lazy and not isinstance(parameter, UninitializedParameter))
        )

    @property
    def was_changed(self) -> bool:
        """Whether the gradient was changed in place since it was handed over.

        Unknown, and so not said, of gradients that are views of one tensor: torch counts their changes together.
        """
        gradient = self.handed_over
        return gradient is not None and gradient._version != self.version and not _is_part(gradient)

    def to_reduce(self, gradient: Tensor, *, densify: bool) -> Tensor:
        """Return the tensor that stands for `gradient` in the reduction, the same in the whole step.

        It shares memory with the gradient where possible.
        """
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
        """Return the gradient of a parameter that no backward pass has reached: zeros, of the layout it usually has."""
        parameter = self.parameter
        if not self.sparse_dimensions:
            return torch.zeros_like(parameter, requires_grad=False)
        shape = tuple(parameter.shape)
        return torch.sparse_coo_tensor(
            torch.empty((self.sparse_dimensions, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *shape[self.sparse_dimensions :]), dtype=parameter.dtype, device=parameter.device),
            shape,
            check_invariants=False,
            device=parameter.device,
        )

    def take_back(self, reduced: Tensor | None) -> None:
        """Make the reduced gradient the parameter's.

        reduced: what could not be reduced in place; None if memory of the gradient holds the result already.
        """
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


def _is_part(gradient: Tensor) -> bool:
    """Whether it is a view; autograd keeps those of its own making (of a torch.cat, say) without the mark of one."""
    is_dense = gradient.layout is torch.strided
    return gradient._is_view() or (is_dense and gradient.untyped_storage().nbytes() > gradient.nbytes)


def reset(slots: Iterable[Slot]) -> None:
    """Begin a new step."""
    for slot in slots:
        slot.passes = 0
        slot.reached = False
        slot.handed_over = None
        slot.wire = None

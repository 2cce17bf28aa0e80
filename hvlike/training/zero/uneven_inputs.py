"""What the ranks of a ZeroRedundancyOptimizer send each other while some are absent (out of data), and its Join hook.

Which ranks are active, what comes next, and the gradients with which an absent rank goes on updating its share. Sent
only while a rank is absent, in the queue of the optimizer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_jobs import home_of
from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.requests.reduction import Max, Sum, arithmetic_of
from hvlike.training import usage_errors
from hvlike.training.gradients.parameters import GroupOptions, copy_options, options_of
from hvlike.training.join.joinable import BuiltInHook
from hvlike.transport.loop.coroutine import Coroutine

if TYPE_CHECKING:
    from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer
    from hvlike.training.zero.steps import Steps


REDUCE, CLIP, UPDATE = "reduce", "clip", "update"


class Clipping(NamedTuple):
    """How gradients are clipped."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool


NO_CLIPPING = Clipping(float("inf"), 2.0, False)


@dataclass(frozen=True)
class StepCommand:
    """What comes next, from the highest active rank."""

    kind: str
    options: GroupOptions = field(default_factory=list)
    """The options of the parameter groups for an update."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keywords of the wrapped step()."""
    without_gradient: frozenset[int] = frozenset()
    """The indices of parameters that have no gradient."""
    clipping: Clipping = NO_CLIPPING


def gather_active_ranks(backend: Backend, rank: int, size: int, *, active: bool) -> Coroutine[list[int]]:
    """Return the active ranks, in rising order, on every rank."""
    flags = torch.zeros(size, dtype=torch.int32, device="cpu")
    flags[rank] = int(active)
    yield from backend.allreduce([flags], arithmetic_of(torch.int32, Sum, size, 1.0, 1.0))
    return [each for each, there in enumerate(flags.tolist()) if there]


def broadcast_command(backend: Backend, leader: int, rank: int, command: StepCommand | None) -> Coroutine[StepCommand]:
    """Return the leader's command on every rank."""
    data = pickle.dumps(command, protocol=5) if rank == leader else b""
    length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    yield from backend.gather([length.view(torch.uint8)], [leader])
    payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    if rank == leader:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    yield from backend.gather([payload], [leader])
    told: StepCommand = pickle.loads(payload.numpy().data)
    return told


def send_gradients(
    backend: Backend, leader: int, rank: int, shares: Sequence[Sequence[Tensor]]
) -> Coroutine[dict[Tensor, Tensor]]:
    """Send the leader's gradients to the absent ranks; return those that came here, by parameter.

    `shares` has, for each absent rank, the parameters whose gradients it needs.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    sends = [_flat_gradients(share) if rank == leader and share else nothing for share in shares]
    receives = [nothing] * len(shares)
    mine = shares[rank]
    if mine:
        receives[leader] = torch.empty(sum(_bytes(parameter) for parameter in mine), dtype=torch.uint8, device="cpu")
    yield from backend.alltoall(sends, receives)
    if not mine:
        return {}
    parts = torch.split(receives[leader], [_bytes(each) for each in mine])
    # Copies: the parts of the flat tensor may not be aligned for their dtype.
    return {
        parameter: part.clone().view(parameter.dtype).view(parameter.shape).to(parameter.device)
        for parameter, part in zip(mine, parts, strict=True)
    }


def total_norm(backend: Backend, size: int, gradients: Sequence[Tensor], norm_type: float) -> Coroutine[Tensor]:
    """Return the norm over the gradients of all ranks, each of which passes those it owns; 0-dim, float64.

    A GPU computes it without a wait of the host.
    """
    home = home_of(backend) or torch.device("cpu")
    norms = [torch.linalg.vector_norm(gradient.detach(), norm_type).to(home, torch.float64) for gradient in gradients]
    own = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), dtype=torch.float64, device=home)]), norm_type)
    largest = norm_type == float("inf")
    part = (own if largest else own**norm_type).reshape(1)
    yield from backend.allreduce([part], arithmetic_of(torch.float64, Max if largest else Sum, size, 1.0, 1.0))
    norm: Tensor = part[0] if largest else part[0].pow(1.0 / norm_type)
    return norm


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _flat_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """The gradients one after the other, row by row, dense, as bytes."""
    flats = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            flats.append(dense.to("cpu", parameter.dtype).contiguous().view(-1).view(torch.uint8))
    return torch.cat(flats)


class ZeroJoinHook(BuiltInHook):
    """Lets a rank that is out of data go on updating its share, in the loop (steps.py).

    Afterwards all ranks have the options of one that has seen all iterations.
    """

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, steps: Callable[[], Steps], *, divides_by_active: bool
    ) -> None:
        """Local. `steps` returns the jobs of now: a parameter group that is added replaces them."""
        self._optimizer = optimizer
        self._steps = steps
        self._divides_by_active = divides_by_active

    def begin(self) -> None:
        """See BuiltInHook."""
        self._steps().divides_by_active = self._divides_by_active

    def leave(self) -> None:
        """See BuiltInHook."""
        if self._steps().is_reduced:
            raise usage_errors.joined_before_step()
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

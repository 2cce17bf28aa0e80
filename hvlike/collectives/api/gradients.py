"""The one autograd function of all collectives, and the derivative of allreduce.

y[r] = c * op over s of (p * x[s]) on every rank r, with L = sum over r of L[r](y[r]) and g = sum over r of dL[r]/dy[r]:

    Sum, Average   dL/dx[s] = (factors) g                          an allreduce with the same op and factors
    Min, Max       dL/dx[s] = c p g / ties where p x[s] was chosen, else 0
    Product        dL/dx[s] = c p g * (product over the other ranks of p x)
    Adasum         none: its coefficients depend on all inputs, and to hold them constant would be a wrong answer
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from hvlike.collectives.requests.reduction import Adasum, Max, Min, Product, ScaledOp, Sum
from hvlike.collectives.session.context import Context, current
from hvlike.config import HOROVODS_OWN
from hvlike.errors import UnsupportedOpError
from hvlike.transport.world import Group
from hvlike.untraced import untraced
from hvlike.version import page

Incoming = Mapping[int, torch.Tensor]  # By the index of the output; whole numbers have none
Gradient = Callable[[Incoming, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Run = Callable[[Sequence[torch.Tensor], str, ScaledOp], list[torch.Tensor]]


@untraced
class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Gradient, keep: bool, *tensors: torch.Tensor) -> Any:
        outputs = run(tensors)
        ctx.gradient, ctx.inputs, ctx.keep = gradient, len(tensors), keep
        ctx.smooth = [index for index, each in enumerate(outputs) if each.is_floating_point() or each.is_complex()]
        ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in ctx.smooth))
        if keep:
            ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Collective like the forward call: all ranks of the set run backward."""
        # Whoever asks for saved tensors after they were freed is refused, though there be none: a second pass would be.
        saved = ctx.saved_tensors if ctx.keep else ()
        found = ctx.gradient({index: gradients[index] for index in ctx.smooth}, saved)
        by_index = dict(zip(ctx.smooth, found, strict=True))
        return (None, None, None, *(by_index.get(index) for index in range(ctx.inputs)))


def differentiable(
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    gradient: Gradient,
    tensors: Sequence[torch.Tensor],
    *,
    keep: bool = False,
) -> list[torch.Tensor]:
    """What `run` makes of the tensors, recorded by autograd.

    gradient: from those of the outputs those of the inputs of the same index; keep: it needs the tensors.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Differentiable.apply
    return list(apply(run, gradient, keep, *tensors))


logger = logging.getLogger("hvlike")
_told: WeakSet[Context] = WeakSet()


def has_horovods_gradients() -> bool:
    """Return whether hvlike runs with HVLIKE_GRADIENTS=horovod. Local."""
    return current().knobs.gradients == HOROVODS_OWN


def follows_horovod(what: str, group: Group, factor: str) -> bool:
    """Return whether the backward of `what` gives what Horovod has there. Local; the log says so the first time."""
    running, follows = current(), has_horovods_gradients()
    if follows and running not in _told and running.world.rank == group.ranks[0]:
        _told.add(running)
        logger.warning(
            "%s: backward gives Horovod's gradient, which is %s the derivative, as HVLIKE_GRADIENTS=horovod asks; a "
            "program that imports horovod has that by default. HVLIKE_GRADIENTS=adjoint gives derivatives; the factors "
            f"are in {page('from-horovod')}. Said once, for all collectives.",
            what,
            factor,
        )
    return follows


def allreduce_gradient(
    run: Run, reduction: ScaledOp, gradients: Incoming, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """`run` is another reduction of the same group, its name with a suffix; tensors: for Min, Max and Product."""
    if reduction.op is Adasum:
        raise UnsupportedOpError(
            "allreduce with op=hvd.Adasum has no derivative: its coefficients depend on the tensors of all ranks. "
            "Pass tensor.detach(), or reduce with op=hvd.Average or op=hvd.Sum where a gradient is needed."
        )
    incoming = list(gradients.values())
    inputs = [tensors[index] for index in gradients] if tensors else []
    if reduction.op is Product:
        return _gradient_of_product(run, reduction, incoming, inputs)
    if reduction.op in (Min, Max):
        return _gradient_of_choice(run, reduction, incoming, inputs)
    # Sum and Average are their own adjoints, the factors included, which are real.
    return run(incoming, "gradient", reduction)


def _gradient_of_choice(
    run: Run, reduction: ScaledOp, incoming: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """To the elements that are the minimum or maximum, in equal parts where several ranks hold it."""
    total = run(incoming, "gradient", _SUM)
    # The result of the forward call may be rounded, by its factors or between nodes; without factors it is exact.
    op = reduction.op if reduction.prescale >= 0 else Min if reduction.op is Max else Max
    plain = [each.detach() for each in inputs]
    best = run(plain, "choice", ScaledOp(op, 1.0, 1.0))
    chosen = [(own == extreme).to(gradient.dtype) for own, extreme, gradient in zip(plain, best, incoming, strict=True)]
    ties = run(chosen, "ties", _SUM)
    scale = reduction.prescale * reduction.postscale
    return [scale * g * mine / tied.clamp(min=1) for g, mine, tied in zip(total, chosen, ties, strict=True)]


def _gradient_of_product(
    run: Run, reduction: ScaledOp, incoming: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """For each element the product over all other ranks, right also where some are zero."""
    if torch.is_grad_enabled():
        raise UnsupportedOpError(
            "allreduce with op=hvd.Product has no second derivative: run backward without create_graph."
        )
    total = run(incoming, "gradient", _SUM)
    scaled = [each * reduction.prescale for each in inputs]
    is_zero = [each == 0 for each in scaled]
    without_zeros = [torch.where(zero, torch.ones_like(each), each) for each, zero in zip(scaled, is_zero, strict=True)]
    products = run(without_zeros, "product", ScaledOp(Product, 1.0, 1.0))
    zeros = run([zero.to(torch.int32) for zero in is_zero], "zeros", _SUM)
    scale = reduction.prescale * reduction.postscale
    result = []
    for g, own, zero, product, count in zip(total, without_zeros, is_zero, products, zeros, strict=True):
        others_have_none = count == zero.to(torch.int32)
        others = torch.where(others_have_none, product / own, torch.zeros_like(product))
        result.append(scale * g * others.conj())
    return result


_SUM = ScaledOp(Sum, 1.0, 1.0)

"""allreduce: every rank gets the reduction of all ranks' tensors.

y[r] = postscale * op over s of (prescale * x[s]) on every rank r. Of the eight public calls those with a
trailing underscore write into the tensors they are given; those with `async` return a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.collectives.allreduce_gradient import GroupedAllreduce
from hvlike.collectives.compression import Compression, CompressorLike
from hvlike.collectives.handles import Handle, synchronize
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import Reduction, check_reduction, choose_op
from hvlike.collectives.submission import begin, check_tensors, signature_of, submit
from hvlike.errors import UsageError
from hvlike.planes.ops import ReduceOp

_differentiable: Callable[..., tuple[torch.Tensor, ...]] = GroupedAllreduce.apply


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: CompressorLike = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Reduce over ranks into a new tensor.

    tensor: any shape and strides, any dtype on which the op is defined; the same shape and dtype on every rank.
    op: Average (default), Sum, Min, Max or Product. Average divides while reducing, integers truncate toward zero;
        16-bit floats accumulate in float32. average: deprecated, True for Average and False for Sum.
    compression: applied before and after, e.g. Compression.fp16.
    Returns a tensor like `tensor`. Collective: every rank of the set calls it, in any order, under the same name.
    Blocks until done.
    Raises: UsageError (a ValueError) on this rank alone; MismatchError, PeerLeftError, ShutdownError (all
        HorovodInternalError) on every rank.
    Gradient: Sum and Average: allreduce of the incoming gradient with the same op and factors. Min and Max: to the
        elements that were chosen, ties share. Product: of the product of the others.
    Source: MPI 4.1 section 6.9.6; horovod.torch.allreduce.
    """
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    compressed, context = compression.compress(tensor)
    (reduced,) = _reduce_out_of_place([compressed], name, reduction, process_set, grouped=False)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Reduce over ranks in place: `allreduce` without compression and gradient; returns `tensor`."""
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    handle = start("allreduce", [tensor], name, reduction, process_set, lambda outputs: outputs[0], wake=False)
    result: torch.Tensor = synchronize(handle)
    return result


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start `allreduce` into a new tensor, which `synchronize(handle)` returns. No gradient. Does not block."""
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    return start("allreduce", [_copy(tensor)], name, reduction, process_set, lambda outputs: outputs[0])


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start `allreduce` in place; leave `tensor` alone until `synchronize(handle)` has returned it."""
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    return start("allreduce", [tensor], name, reduction, process_set, lambda outputs: outputs[0])


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: CompressorLike = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors at once, never partially; dtypes may be mixed. Returns a list of new tensors.

    Raises: UsageError for an empty list; else as `allreduce`.
    Gradient: as `allreduce`, grouped.
    """
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    pairs = [compression.compress(tensor) for tensor in _listed(tensors)]
    reduced = _reduce_out_of_place([pair[0] for pair in pairs], name, reduction, process_set, grouped=True)
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """`grouped_allreduce` in place, without compression and gradient; returns the tensors."""
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    handle = start("grouped_allreduce", _listed(tensors), name, reduction, process_set, list, wake=False)
    result: list[torch.Tensor] = synchronize(handle)
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start `grouped_allreduce` into new tensors, which `synchronize(handle)` returns. No gradient."""
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    copies = [_copy(tensor) for tensor in _listed(tensors)]
    return start("grouped_allreduce", copies, name, reduction, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start `grouped_allreduce` in place; leave the tensors alone until `synchronize(handle)` has returned them."""
    reduction = Reduction(choose_op(average, op), float(prescale_factor), float(postscale_factor))
    return start("grouped_allreduce", _listed(tensors), name, reduction, process_set, list)


def start(
    what: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet | None,
    result: Any,
    *,
    wake: bool = True,
) -> Handle:
    """Start reducing `tensors` in place; `result(tensors)` is what the handle returns."""
    membership, full_name = begin(what, name, process_set)
    check_tensors(what, full_name, tensors)
    check_reduction(what, full_name, reduction, [tensor.dtype for tensor in tensors])
    signature = signature_of(
        "allreduce", tensors, op=int(reduction.op), prescale=reduction.prescale, postscale=reduction.postscale
    )
    if what != "allreduce":
        full_name = f"{what}.{full_name}"
    return submit(membership, signature, full_name, tensors, lambda request: result(request.tensors), wake=wake)


def _reduce_out_of_place(
    tensors: list[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet | None,
    *,
    grouped: bool,
) -> list[torch.Tensor]:
    """Reduce into new tensors, recorded by autograd where a gradient may be asked for."""
    what = "grouped_allreduce" if grouped else "allreduce"

    def run(inputs: Sequence[torch.Tensor], run_name: str | None, run_as: Reduction) -> list[torch.Tensor]:
        handle = start(what, [_copy(tensor) for tensor in inputs], run_name, run_as, process_set, list, wake=False)
        result: list[torch.Tensor] = synchronize(handle)
        return result

    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors):
        return list(_differentiable(run, name, reduction, *tensors))
    return run(tensors, name, reduction)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to reduce into, holding the same values in the same order in memory."""
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def _listed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    listed = list(tensors)
    if not listed:
        raise UsageError("grouped_allreduce: expected at least one tensor, got an empty list.")
    return listed


__all__ = [
    "ReduceOp",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]

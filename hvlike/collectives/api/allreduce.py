"""allreduce and its derivative: every rank gets the reduction of all ranks' tensors.

y[r] = postscale * op over s of (prescale * x[s]) on every rank r. Of the eight public calls those with a trailing
underscore write into the tensors they are given; those with `async` return a handle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import op_name
from hvlike.backends.operation import Operation, synchronize
from hvlike.collectives.api.gradients import (
    Incoming,
    allreduce_gradient,
    differentiable,
    follows_horovod,
    has_horovods_gradients,
)
from hvlike.collectives.compression import Compression, CompressorLike, check_compressor
from hvlike.collectives.controller.inline_calls import DONE, NOT_AT_ALL, inline_allreduces
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Max, Min, Product, ScaledOp, Sum, reduction_of
from hvlike.collectives.requests.request import (
    Request,
    all_tensors,
    check_before_compression,
    copy_of,
    first_tensor,
    listed,
    needs_gradient,
    spec_of,
)
from hvlike.collectives.session.context import BegunCall, begin
from hvlike.errors import UsageError


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
    """Reduce a tensor over ranks into a new tensor.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensor: Any shape and strides, any dtype on which the op is defined; the same shape and dtype on every rank.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: Matches calls between ranks. Default: numbered by the order of unnamed calls of this kind.
        compression: An object with `compress` and `decompress`, e.g. Compression.fp16. Default: Compression.none.
        op: Average (default), Sum, Min, Max, Product or Adasum. Average divides while it reduces; integers truncate
            toward zero; 16-bit floats accumulate in float32. Adasum (Maleki et al., 2021; real floats only) counts once
            what the ranks' tensors have in common.
        prescale_factor: Every rank's tensor is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A new tensor like `tensor`, equal on every rank.

    Raises:
        UsageError: On this rank alone, for a wrong argument (a ValueError).
        MismatchError: On every rank, if the ranks pass different shapes, dtypes or options; the job can go on.
        PeerLeftError: If a rank of the set has ended its program; ShutdownError, if it has called shutdown().

    Example:
        >>> loss = hvd.allreduce(loss, name="loss")

    Gradient: Sum and Average: allreduce of the incoming gradient with the same op and factors. Min and Max: the
    incoming gradient goes to the elements that were the minimum or maximum; equal ones share it. Product: the incoming
    gradient times the product of the other ranks' tensors. Adasum: backward raises UnsupportedOpError. With
    HVLIKE_GRADIENTS=horovod the same op is applied to the incoming gradients.
    Source: MPI 4.1 section 6.9.6; horovod.torch.allreduce.
    """
    plain = average is None and compression is Compression.none and isinstance(tensor, torch.Tensor)
    if plain and not needs_gradient([tensor]):
        return allreduce_(copy_of(tensor), None, name, op, prescale_factor, postscale_factor, process_set)
    call = _begin("allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    compressor = check_compressor(compression)
    check_before_compression("allreduce", call[0].name, [tensor])
    compressed, context = compressor.compress(tensor)
    (reduced,) = _reduce_out_of_place(*call, [compressed])
    return compressor.decompress(reduced, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """`allreduce` in place, without compression and gradient. Collective; blocks.

    Args:
        tensor: As in `allreduce`; it is overwritten with the result.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        `tensor`.

    Raises:
        HorovodInternalError, UsageError: As `allreduce`.
    """
    way = inline_allreduces.by_set.get(0 if process_set is None else getattr(process_set, "process_set_id", None))
    counted = False
    if way is not None and average is None:
        tried = way.attempt(tensor, name, op, prescale_factor, postscale_factor)
        if tried is DONE:
            return tensor
        if tried is not NOT_AT_ALL:
            name, counted = tried, True
    call = _begin("allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    handle = _start(*call, [tensor], wake=False, counted=counted)
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
) -> Operation:
    """Start `allreduce` into a new tensor. No gradient. Collective, as `allreduce`; does not block.

    Args:
        tensor: As in `allreduce`. It is copied before this returns.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the new tensor.

    Raises:
        UsageError: At once, as `allreduce`. All other errors of `allreduce` come from `synchronize`.
    """
    call = _begin("allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    return _start(*call, [copy_of(tensor)])


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation:
    """Start `allreduce` in place. No gradient. Collective, as `allreduce`; does not block.

    Args:
        tensor: As in `allreduce`. Leave it alone until `synchronize(handle)` has returned it.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns `tensor`.

    Raises:
        UsageError: At once, as `allreduce`. All other errors of `allreduce` come from `synchronize`.
    """
    call = _begin("allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    return _start(*call, [tensor])


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
    """Reduce several tensors at once into new ones, all or none of them.

    Collective: every rank of the set calls it, in any order, under the same name. Blocks until done.

    Args:
        tensors: A non-empty sequence of tensors as in `allreduce`; dtypes may be mixed.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        compression: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list of new tensors, in the order of `tensors`.

    Raises:
        HorovodInternalError, UsageError: As `allreduce`.

    Gradient: As `allreduce`, grouped.
    Source: horovod.torch.grouped_allreduce.
    """
    call = _begin("grouped_allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    compressor = check_compressor(compression)
    given = listed("grouped_allreduce", tensors)
    check_before_compression("grouped_allreduce", call[0].name, given)
    pairs = [compressor.compress(tensor) for tensor in given]
    reduced = _reduce_out_of_place(*call, [pair[0] for pair in pairs])
    return [compressor.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """`grouped_allreduce` in place, without compression and gradient. Collective; blocks.

    Args:
        tensors: As in `grouped_allreduce`; they are overwritten with the results.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list of the same tensors.

    Raises:
        HorovodInternalError, UsageError: As `allreduce`.
    """
    call = _begin("grouped_allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    handle = _start(*call, listed("grouped_allreduce", tensors), wake=False)
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
) -> Operation:
    """Start `grouped_allreduce` into new tensors. No gradient. Collective, as `grouped_allreduce`; does not block.

    Args:
        tensors: A non-empty sequence of tensors as in `allreduce`; dtypes may be mixed.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the list of new tensors.

    Raises:
        UsageError: At once, as `allreduce`. All other errors of `allreduce` come from `synchronize`.
    """
    call = _begin("grouped_allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    copies = [copy_of(tensor) for tensor in listed("grouped_allreduce", tensors)]
    return _start(*call, copies)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation:
    """Start `grouped_allreduce` in place. No gradient. Collective, as `grouped_allreduce`; does not block.

    Args:
        tensors: As in `grouped_allreduce`. Leave them alone until `synchronize` returns.
        average: Deprecated, as in Horovod: True for Average, False for Sum. Default: use `op`.
        name: As in `allreduce`.
        op: Average (default), Sum, Min, Max, Product or Adasum; see `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A handle; `synchronize(handle)` returns the list of tensors.

    Raises:
        UsageError: At once, as `allreduce`. All other errors of `allreduce` come from `synchronize`.
    """
    call = _begin("grouped_allreduce", name, process_set, average, op, prescale_factor, postscale_factor)
    return _start(*call, listed("grouped_allreduce", tensors))


def _begin(
    what: str,
    name: str | None,
    process_set: ProcessSet | None,
    average: bool | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
) -> tuple[BegunCall, ScaledOp]:
    """Number the call before anything can be wrong with it, then look at what it asks for. Raises: UsageError."""
    call = begin(what, name, process_set)
    if average is not None:
        if op is not None:
            raise UsageError("The op parameter supersedes average. Please provide only one of them.")
        text = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    elif op is None:
        op = Average
    return call, reduction_of(op, prescale_factor, postscale_factor)


def _start(
    call: BegunCall, reduction: ScaledOp, tensors: Sequence[torch.Tensor], *, wake: bool = True, counted: bool = False
) -> Operation:
    """Start reducing `tensors` in place. The handle returns the tensor of a single call, the list of a grouped one."""
    what, set_state, name, _, _ = call
    spec = spec_of("allreduce", what, name, tensors, reduction=reduction, written=True)
    finish: Callable[[Request], Any] = first_tensor
    if what != "allreduce":
        name, finish = f"{what}.{name}", all_tensors
    elif set_state.inline is not None and spec not in set_state.inline.learned:
        set_state.inline.learn(spec, tensors[0])
    return set_state.controller.submit(spec, name, tensors, finish, wake=wake, counted=counted)


def _reduce_out_of_place(call: BegunCall, reduction: ScaledOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    def forward(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        result = synchronize(_start(call, reduction, [copy_of(each) for each in inputs], wake=False))
        return [result] if call.what == "allreduce" else result

    def run(inputs: Sequence[torch.Tensor], suffix: str, reduction: ScaledOp) -> list[torch.Tensor]:
        return _reduce_out_of_place(call.another(call.what, suffix), reduction, list(inputs))

    if not needs_gradient(tensors):
        return forward(tensors)

    own = reduction.op in (Sum, Average)

    def gradient(incoming: Incoming, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not own and follows_horovod(f"{call.what} with op {op_name(reduction.op)}", call.set_state.group, "not"):
            return run(list(incoming.values()), "gradient", reduction)
        return allreduce_gradient(run, reduction, incoming, inputs)

    # Only the derivative needs the tensors: Horovod's gradient lets each output of a group have a backward of its own.
    keep = reduction.op in (Min, Max, Product) and not has_horovods_gradients()
    return differentiable(forward, gradient, tensors, keep=keep)

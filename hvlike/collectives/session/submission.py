"""From a public call to a request in flight: the process set, the name, the checks; the same for every collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.cuda.runtime import KINDS, events_of
from hvlike.backends.op_queue import Job
from hvlike.collectives.requests.reduction import Reduction, check_reduction
from hvlike.collectives.requests.request import Handle, Request, RequestSpec, find_call_site, spec_of_tensors
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import element_of

MOST_SPECS = 4096
"""Specs of single tensors that are remembered; with one more all are made anew."""

_specs: dict[tuple[Any, ...], RequestSpec] = {}


def spec_of(
    kind: str,
    what: str,
    name: str,
    tensors: Sequence[torch.Tensor],
    *,
    reduction: Reduction | None = None,
    written: bool = False,
    root: int = -1,
    detail: Any = None,
) -> RequestSpec:
    """What the ranks compare of an operation on these tensors, which are checked. A known kind of tensor costs a look.

    what: the public call, for the error texts. written: it writes into the tensors.
    """
    key = None
    if len(tensors) == 1:
        tensor = tensors[0]
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            shape, order = tensor.shape, tensor.stride()
            key = (what, shape, order, tensor.dtype, tensor.device, reduction, written, root, detail)
            known = _specs.get(key)
            if known is not None:
                return known
    check_tensors(what, name, tensors)
    if written:
        check_writable(what, name, tensors)
    options: dict[str, Any] = {"root": root, "detail": detail}
    if reduction is not None:
        check_reduction(what, name, reduction, [tensor.dtype for tensor in tensors])
        options |= {"op": int(reduction.op), "prescale": reduction.prescale, "postscale": reduction.postscale}
    spec = spec_of_tensors(kind, tensors, **options)
    if key is not None:
        if len(_specs) >= MOST_SPECS:
            _specs.clear()
        _specs[key] = spec
    return spec


def submit(
    set_state: ProcessSetState,
    spec: RequestSpec,
    name: str,
    tensors: Sequence[torch.Tensor],
    finish: Callable[[Request], Any],
    *,
    wake: bool = True,
    job: Callable[[Any], Job] | None = None,
    counted: bool = False,
    home: torch.device | None = None,
) -> Handle:
    """Put an operation in flight. `wake=False`: the caller waits for the handle at once.

    job, home: see Request. counted: an inline attempt was made before, which has numbered it.
    """
    request = Request(name, spec, tensors, finish, job=job, place=find_call_site(), home=home)
    if spec.device in KINDS:
        request.ready = events_of(spec.device, tensors)
    set_state.controller.submit(request, wake=wake, counted=counted)
    return request.handle


def first_tensor(request: Request) -> torch.Tensor:
    """The result of an operation that writes into one tensor."""
    return request.tensors[0]


def all_tensors(request: Request) -> list[torch.Tensor]:
    """The result of an operation that writes into several tensors."""
    return list(request.tensors)


def check_tensors(kind: str, name: str, tensors: Sequence[Any]) -> None:
    """Refuse what cannot be communicated, before anything is sent."""
    for index, tensor in enumerate(tensors):
        which = repr(name) if len(tensors) == 1 else f"{name!r} (tensor {index})"
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{kind} {which}: expected a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{kind} {which}: expected a dense tensor, got layout {tensor.layout}; convert it with to_dense()."
            )
        if tensor.device.type == "meta":
            raise UsageError(f"{kind} {which}: the tensor is on the meta device and has no data.")
        try:
            element_of(tensor.dtype)
        except UsageError as error:
            raise UsageError(f"{kind} {which}: {error}") from None
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(f"{kind} {name!r}: all tensors of a group must be on one device, got {sorted(devices)}.")


def check_writable(kind: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors to be written in place whose elements share memory: an expanded one has no room for a result."""
    for tensor in tensors:
        overlaps = any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
        if overlaps and tensor.numel():
            raise UsageError(
                f"{kind} {name!r}: several elements of this tensor of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())} are one place in memory (expand() makes such tensors), so it cannot be "
                "written in place. Pass tensor.contiguous(), or use the call without the trailing underscore."
            )

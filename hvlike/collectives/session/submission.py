"""From a public call to a request in flight: the process set, the name, the checks; the same for every collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.cuda.runtime import events_of
from hvlike.backends.op_queue import Job
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.request import Handle, Request, RequestSpec, find_call_site, signature_of
from hvlike.collectives.session.context import current
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import element_of


def submit(
    set_state: ProcessSetState,
    signature: RequestSpec,
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

    job, home: see Request. counted: it was tried on the express way before.
    """
    request = Request(name, signature, tensors, finish, job=job, place=find_call_site(), home=home)
    request.ready = events_of(signature.device, tensors)
    set_state.controller.submit(request, wake=wake, counted=counted)
    return request.handle


def begin(kind: str, name: str | None, process_set: ProcessSet | None) -> tuple[ProcessSetState, str]:
    """The process set and the name of a call; an unnamed one is numbered even if it turns out to be wrong.

    Else this rank would meet the others' next operation in place of the one they have begun.
    """
    set_state = current().set_state(process_set, kind.capitalize())
    return set_state, set_state.controller.names.next(kind) if name is None else str(name)


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


__all__ = ["begin", "check_tensors", "check_writable", "signature_of", "submit"]

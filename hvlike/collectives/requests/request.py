"""What a caller asks for: the request, what must be equal on all ranks (`RequestSpec`), and where in the user's program
the call is (`CallSite`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch

from hvlike.backends.cuda.runtime import Event
from hvlike.backends.op_queue import Job
from hvlike.backends.operation import Operation
from hvlike.collectives.requests.reduction import ScaledOp, check_reduction, is_dense
from hvlike.errors import UsageError, WrongTypeError
from hvlike.system.system import system
from hvlike.transport.memory.dtypes import dtype_name, element_of
from hvlike.transport.memory.own_memory import check_memory, check_stand_in, has_memory, stand_in

_HOUSE = str(Path(__file__).parents[2])
_NOT_THE_USER = (_HOUSE, str(Path(torch.__file__).parent))


class CallSite(NamedTuple):
    """An instruction of a program; str() finds its file and line, which takes longer than to note it."""

    code: CodeType
    instruction: int

    def __str__(self) -> str:
        """/home/me/train.py:12"""
        lines = (line for start, stop, line in self.code.co_lines() if start <= self.instruction < stop)
        return f"{self.code.co_filename}:{next(lines, None) or self.code.co_firstlineno}"


def find_call_site(known: int = 1) -> CallSite:
    """Where the user's program is: the innermost frame outside of hvlike and torch. known: frames to skip at once."""
    frame = sys._getframe(known + 1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return CallSite(frame.f_code, frame.f_lasti)


@functools.cache
def _is_inside(filename: str) -> bool:
    return filename.startswith(_NOT_THE_USER)


RequestKey = tuple[str, str]  # Kind and name: what identifies an operation in flight


class RequestSpec(NamedTuple):
    """What the ranks compare before any data moves. Plain values only: it travels to the coordinator."""

    kind: str  # allreduce, broadcast, allgather, barrier, plan, ...
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1  # Rank of the world, or -1
    strides: tuple[tuple[int, ...] | None, ...] = ()  # Of dense tensors not row by row; need not be equal
    detail: Any = None  # What only this kind knows about


@dataclass(eq=False)
class Request:
    name: str
    spec: RequestSpec
    tensors: Sequence[torch.Tensor]
    finish: Callable[[Request], Any]  # Makes the result once the tensors or outputs hold it; called in the loop
    operation: Operation = field(default_factory=Operation)
    outputs: list[Any] = field(default_factory=list)  # What the job itself has made: gathered tensors, queues
    job: Callable[[Any], Job] | None = None  # Makes the job of a request that brings its own, from `Response.extra`
    place: CallSite | str = ""
    time: float = field(default_factory=system.monotonic)
    ready: Sequence[Event] = ()  # When the tensors of a device hold their values
    home: torch.device | None = None  # The device of this rank, for a request without tensors that opens a queue

    def __post_init__(self) -> None:
        self.key: RequestKey = (self.spec.kind, self.name)


def spec_of_tensors(kind: str, tensors: Sequence[torch.Tensor], **fields: Any) -> RequestSpec:
    return RequestSpec(
        kind=kind,
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        strides=tuple(order_in_memory(tensor) for tensor in tensors),
        **fields,
    )


def order_in_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor that is not stored row by row; None for all others."""
    if tensor.is_contiguous() or not is_dense(tensor.shape, tensor.stride()):
        return None
    return tuple(tensor.stride())


MOST_SPECS = 4096

_specs: dict[tuple[Any, ...], RequestSpec] = {}


def spec_of(
    kind: str,
    what: str,
    name: str,
    tensors: Sequence[torch.Tensor],
    *,
    reduction: ScaledOp | None = None,
    written: bool = False,
    root: int = -1,
    detail: Any = None,
) -> RequestSpec:
    """What ranks compare of an operation, which is checked. what: the call, for errors. written: into the tensors."""
    key = None
    if len(tensors) == 1:
        tensor = tensors[0]
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and has_memory(tensor):
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


def first_tensor(request: Request) -> torch.Tensor:
    return request.tensors[0]


def all_tensors(request: Request) -> list[torch.Tensor]:
    return list(request.tensors)


def check_tensors(kind: str, name: str, tensors: Sequence[Any]) -> None:
    for index, tensor in enumerate(tensors):
        which = repr(name) if len(tensors) == 1 else f"{name!r} (tensor {index})"
        if not isinstance(tensor, torch.Tensor):
            raise WrongTypeError(f"{kind} {which}: expected a torch.Tensor, got {type(tensor).__name__}.")
        check_stand_in(f"{kind} {which}", tensor)
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{kind} {which}: expected a dense tensor, got layout {tensor.layout}; convert it with to_dense()."
            )
        check_memory(f"{kind} {which}", tensor)
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
                f"{list(tensor.stride())} share one place in memory (as expand() makes them), so it cannot be "
                "written in place. Pass tensor.contiguous(), or use the call without the trailing underscore."
            )


def listed(what: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a grouped call, at least one."""
    if not isinstance(tensors, Iterable):
        raise WrongTypeError(f"{what}: expected a list of tensors, got {type(tensors).__name__}.")
    found = list(tensors)
    if not found:
        raise UsageError(f"{what}: expected at least one tensor, got an empty list.")
    return found


def needs_gradient(tensors: Sequence[Any]) -> bool:
    """Whether autograd records the call. Not with tensors of torch.func and the like, which the call itself refuses."""
    return (
        torch.is_grad_enabled()
        and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)
        and not any(isinstance(each, torch.Tensor) and stand_in(each) for each in tensors)
    )


def check_before_compression(call: str, name: str, tensors: Sequence[Any]) -> None:
    """Refuse tensors that a compressor could not compute with: it may be anybody's."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            check_stand_in(f"{call} {name!r}", tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to write into, with the same values in the same order in memory; one that is to be refused, as it is."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.Tensor) and stand_in(tensor):
        return tensor
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor

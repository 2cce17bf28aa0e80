"""What a caller asks for: the request, what must be equal on all ranks (`RequestSpec`), where in the user's program the
call is (`CallSite`), and the `Handle` to wait for the result.

A handle is future-like (`wait`, `done`, `result`) and is what Horovod's `poll` and `synchronize` take.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch

from hvlike.backends.cuda.runtime import Event
from hvlike.backends.op_queue import Job
from hvlike.collectives.requests.reduction import Reduction, check_reduction, is_dense
from hvlike.errors import UnknownHandleError, UsageError, WaitTimeoutError, WrongTypeError
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


_numbers = itertools.count()

Waiter = Callable[[Callable[[], bool], float | None], bool]  # False when the given seconds have passed first


class Handle:
    """One operation in flight on this rank."""

    __slots__ = ("_done", "_error", "_fence", "_lock", "_result", "cleared", "number", "waiter")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.cleared = False
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._fence: Callable[[], None] | None = None
        self.waiter: Waiter | None = None  # Blocks until a condition holds, at most some seconds
        self._lock = system.Lock()

    def complete(self, result: Any, error: BaseException | None, fence: Callable[[], None] | None = None) -> None:
        """Record how the operation ended; the first call counts.

        Args:
            result: The output.
            error: What `wait` and `result` raise; None if it ended well.
            fence: Called by every thread that has waited, before it uses the result: on a GPU it may not be done yet.
        """
        with self._lock:
            if not self._done:
                self._result, self._error, self._fence = result, error, fence
                self._done = True

    def done(self) -> bool:
        """True once the operation has ended, well or badly. Never blocks."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the operation has ended; on a GPU, until it is in a stream that the current one then waits for.

        Args:
            timeout: Seconds; None for no limit.

        Returns:
            True when it has ended, False when the time ran out before. The operation goes on then.

        Raises:
            HorovodInternalError: The error of the operation.
        """
        if not self._done and self.waiter is not None:
            self.waiter(self.done, timeout)
        if self._done and self._error is not None:
            raise self._error
        if self._done and self._fence is not None:
            self._fence()
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended and return its output. May be called repeatedly.

        Args:
            timeout: Seconds; None for no limit.

        Returns:
            The output, as `synchronize`.

        Raises:
            HorovodInternalError: The error of the operation.
            TimeoutError: When the time ran out before.
        """
        if not self.wait(timeout):
            raise WaitTimeoutError(f"the operation of {self!r} has not ended within {timeout} s")
        return self._result

    def __int__(self) -> int:
        """A number of its own in this process: Horovod's handles are numbers."""
        return self.number

    def __repr__(self) -> str:
        state = "done" if self._done else "in flight"
        return f"Handle({self.number}, {state})"


def poll(handle: Handle) -> bool:
    """Say whether an operation has ended. Never blocks.

    Args:
        handle: What an asynchronous call returned.

    Returns:
        True once `synchronize` would return (or raise) at once.

    Raises:
        UnknownHandleError: If it is not a handle, or was synchronized before (a ValueError).

    Source: horovod.torch.poll.
    """
    if not isinstance(handle, Handle) or handle.cleared:
        raise _unknown(handle)
    if not handle.done() and handle.waiter is not None:
        handle.waiter(handle.done, 0.0)
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Block until an operation has ended, return its output and forget the handle.

    Args:
        handle: What an asynchronous call returned.

    Returns:
        The output tensor, or a list of them for grouped operations.

    Raises:
        UnknownHandleError: If it is not a handle, or was synchronized before (a ValueError).
        HorovodInternalError: The error of the operation: MismatchError, PeerLeftError, StalledError, ShutdownError, ...

    Example:
        >>> handle = hvd.allreduce_async(tensor)
        >>> tensor = hvd.synchronize(handle)

    Source: horovod.torch.synchronize.
    """
    if not isinstance(handle, Handle) or handle.cleared:
        raise _unknown(handle)
    handle.cleared = True
    handle.wait()
    return handle._result


def _unknown(handle: object) -> UnknownHandleError:
    if not isinstance(handle, Handle):
        return UnknownHandleError(
            f"Handle {handle!r} was not created or has been cleared. Expected what an *_async call of this process "
            f"returned, got {type(handle).__name__}."
        )
    return UnknownHandleError(
        f"Handle {handle.number} was not created or has been cleared. It was synchronized before: keep the output "
        "of the first synchronize, or call handle.result(), which may be repeated."
    )


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
    handle: Handle = field(default_factory=Handle)
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
    reduction: Reduction | None = None,
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

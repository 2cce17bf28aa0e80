"""NCCL through CuPy, and the nccl backend: every rank has a GPU of its own. The only file that imports cupy.

A call puts kernels into the stream and returns; nothing waits. What NCCL cannot reduce as the host does (whole numbers
with factors, products of complex numbers, int16) goes through host memory.

CuPy's `cupy.cuda.nccl` calls the libnccl.so.2 that the process has loaded already, where there is one: torch is
imported first, so it is torch's. Its calls take addresses and release the interpreter's lock. CuPy for ROCm calls RCCL
under the same names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import LIBRARY_NAMES, ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend, scale_
from hvlike.backends.cuda.runtime import DeviceRuntime, Event
from hvlike.errors import HorovodInternalError, ShutdownError, StalledError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import Kind

ID_BYTES = 128
logger = logging.getLogger("hvlike")

MOST_IN_GROUP = 2048  # NCCL refuses more calls in a group
FINISH_SECONDS = 10.0  # How long a healthy communicator may take to end what is in flight

_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy-rocm-7-0", "cupy-rocm-6-0", "cupy")
_LIBRARY = "librccl.so" if torch.version.hip else "libnccl.so"  # AMD's has the same functions
# NCCL_SUM and so on, NCCL_INT8 and so on.
_OPS = ("sum", "avg", "min", "max", "prod")
_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


# NCCL forbids two threads to use communicators of one device at a time: it may be the loop and one in backward.
_LAUNCHING = threading.Lock()


class NcclFacts(NamedTuple):
    """What is installed. Plain values."""

    cupy: str
    version: int  # Version of NCCL in its own notation, 22703 for 2.27.3; 0 where it cannot be used
    missing: str  # Why it cannot be used and what to do; empty where it can


class Nccl:
    """The module `cupy.cuda.nccl`, by its meaning."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.version = int(module.get_version())
        known = {name: f"NCCL_{name.upper()}" for name in _OPS + _DTYPES}
        numbers = {name: int(getattr(module, known[name])) for name in known if hasattr(module, known[name])}
        self.ops = {name: numbers[name] for name in _OPS if name in numbers}  # Those that this version has
        self.dtypes = {getattr(torch, name): numbers[name] for name in _DTYPES if name in numbers}

    def new_id(self) -> bytes:
        number = self._module.get_unique_id()
        # CuPy before 14 has it as numbers of one signed byte.
        return number if isinstance(number, bytes) else bytes(each & 255 for each in number)

    def connect(self, size: int, number: bytes, rank: int) -> Communicator:
        """Join the communicator with this number. Blocks until all ranks do: never in the loop."""
        # Else the first call of a kind connects the ranks, and blocks until all make it, with _LAUNCHING held.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        make = self._module.NcclCommunicator
        try:
            link = make(size, number, rank)
        except TypeError:
            # CuPy before 14, which refuses the form before it does anything.
            link = make(size, tuple((each ^ 128) - 128 for each in number), rank)
        return Communicator(self, link)

    @contextmanager
    def group(self) -> Iterator[None]:
        self._module.groupStart()
        try:
            yield
        finally:
            self._module.groupEnd()


class Communicator:
    """The ranks of a group, each with its GPU. Calls put work into a stream and return."""

    def __init__(self, nccl: Nccl, link: Any) -> None:
        self.nccl = nccl
        self.link = link
        self._ended = threading.Lock()
        self._ending: threading.Thread | None = None

    def error(self) -> Exception | None:
        try:
            self.link.check_async_error()
        except Exception as error:
            # Not always an NcclError: CuPy 14.2 has no names for the newer ones and stumbles over them.
            return error
        return None

    def abort(self) -> None:
        """End what is in flight, in a thread, as that may take a moment; once. For a communicator that is broken."""
        self._end(self.link.abort)

    def finish(self, is_idle: Callable[[], bool]) -> None:
        """Let what is in flight end, then give the communicator back, in a thread; once. All ranks do.

        is_idle: True when nothing is in flight. Where that takes too long, another rank has not begun: abort.
        """
        self._end(lambda: self._finish(is_idle))

    def join(self, until: float) -> bool:
        """Wait for `abort` or `finish` until this value of time.monotonic(); False where it has not ended."""
        if self._ending is not None:
            self._ending.join(max(0.0, until - time.monotonic()))
        return self._ending is None or not self._ending.is_alive()

    def _end(self, how: Callable[[], None]) -> None:
        def run() -> None:
            try:
                how()
            except Exception as error:
                # The device has failed, or NCCL has: who waits for a result has been told already.
                logger.warning("a communicator of NCCL could not be ended: %s", str(error).partition("\n")[0])

        if self._ended.acquire(blocking=False):
            self._ending = threading.Thread(target=run, name="hvlike-nccl-end", daemon=True)
            self._ending.start()

    def _finish(self, is_idle: Callable[[], bool]) -> None:
        until = time.monotonic() + FINISH_SECONDS
        while not is_idle():
            if time.monotonic() > until:
                # ncclCommAbort ends kernels that run, and leaves wrong data: only where they would not end.
                self.link.abort()
                return
            time.sleep(0.0005)
        self.link.destroy()


def load() -> Nccl:
    """NCCL, if CuPy has it here. Raises: ImportError, RuntimeError, with the reason."""
    module = importlib.import_module("cupy.cuda.nccl")
    if not getattr(module, "available", True):
        raise ImportError(f"cupy.cuda.nccl finds no {_LIBRARY}")
    return Nccl(module)


def describe() -> NcclFacts:
    """What of NCCL is installed. Never raises; loads CuPy and libnccl, but starts no GPU. Local."""
    cupy = _installed_cupy()
    try:
        version, missing = load().version, ""
    except Exception as error:
        extra = "rocm" if torch.version.hip else f"cuda{(torch.version.cuda or '12').split('.')[0]}"
        reason = f"CuPy {cupy} is installed, but {error}" if cupy else "CuPy is not installed"
        version, missing = 0, f"{reason}: pip install hvlike[{extra}]"
    return NcclFacts(cupy, version, missing)


def _installed_cupy() -> str:
    found = (each for name in _DISTRIBUTIONS for each in importlib.metadata.distributions(name=name))
    return next((each.version for each in found), "")


class Recipe(NamedTuple):
    op: str
    before: float
    after: float
    seen_as: torch.dtype | None = None  # The dtype that NCCL is told; None for the tensor's own

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.seen_as is None else tensor.view(self.seen_as)


def recipe_of(arithmetic: Arithmetic, size: int) -> Recipe | None:
    """How to do it among `size` ranks; None where NCCL cannot, or not with the results that the host gives."""
    op, factors, kind = arithmetic.op, arithmetic.factors, arithmetic.element.kind
    before, after = factors.prescale, factors.postscale
    if op not in LIBRARY_NAMES:
        return None
    if kind is Kind.BOOL:
        return Recipe("max" if op in (ReduceOp.SUM, ReduceOp.MAX) else "min", 1.0, 1.0, torch.uint8)
    if kind is Kind.INTEGER:
        plain = before == after == factors.divisor == 1
        return Recipe(LIBRARY_NAMES[op], 1.0, 1.0) if plain and arithmetic.dtype is not torch.int16 else None
    seen_as = None
    if kind is Kind.COMPLEX:
        if op is ReduceOp.PRODUCT:
            return None
        seen_as = torch.float32 if arithmetic.dtype is torch.complex64 else torch.float64
    if factors.divisor == size and op is ReduceOp.AVERAGE:
        return Recipe("avg", before, after, seen_as)
    return Recipe(LIBRARY_NAMES[op], before, after / factors.divisor, seen_as)


def _in_place(call: Callable[..., None], tensor: torch.Tensor, *others: int) -> tuple[Any, ...]:
    return (call, tensor.data_ptr(), tensor.data_ptr(), len(tensor), *others)


class NcclBackend(DeviceBackend):
    """See the head of this file. Calls of one backend are made in the same order on all ranks."""

    name = "NCCL"
    launches = True

    def __init__(
        self,
        host: Backend,
        runtime: DeviceRuntime,
        device: torch.device,
        place: tuple[int, int],
        communicator: Communicator,
        limit: float,
    ) -> None:
        """place: rank in the group, and its size, as in the communicator. limit: seconds for a call; 0: none."""
        super().__init__(host, runtime, device, place[0])
        self._size = place[1]
        self._communicator = communicator
        self._limit = limit
        self._address = runtime.address(self.stream)
        self._under_way: deque[tuple[Event, float]] = deque()

    def watch(self, now: float) -> HorovodInternalError | None:
        if self.broken is not None:
            return None
        failure = self._communicator.error()
        if failure is not None:
            return HorovodInternalError(
                f"NCCL reports an error on the communicator of {self.home}: {failure}. Another rank has died or the "
                "connection to it has broken; set NCCL_DEBUG=INFO to see more."
            )
        under_way = self._under_way
        try:
            while under_way and self.runtime.has_passed(under_way[0][0]):
                under_way.popleft()
        except RuntimeError as error:
            # An error of a kernel, of whoever put it there, stays: all that is asked of this device fails from now on.
            return HorovodInternalError(f"{self.home} has failed: {str(error).splitlines()[0]}")
        if self._limit and under_way and now - under_way[0][1] > self._limit:
            return StalledError(
                f"A collective on {self.home} has not ended within {self._limit:g} s: another rank has not begun it, "
                "or what comes before it on the GPU takes that long. Set HVLIKE_NCCL_TIMEOUT_SECONDS for longer waits."
            )
        return None

    def abort(self, error: BaseException) -> None:
        """As everywhere. Ends kernels that wait for other ranks; where hvlike is shut down, they finish."""
        super().abort(error)
        if isinstance(error, ShutdownError):
            self._communicator.finish(self._is_idle)
        else:
            self._communicator.abort()

    def join(self, until: float) -> bool:
        """Wait for what `abort` has begun until this value of time.monotonic(); False where it has not ended."""
        return self._communicator.join(until)

    def _is_idle(self) -> bool:
        with _LAUNCHING:
            while self._under_way and self.runtime.has_passed(self._under_way[0][0]):
                self._under_way.popleft()
            return not self._under_way

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._allreduce(tensors, arithmetic)
            return
        flats = [recipe.view(tensor) for tensor in tensors if len(tensor)]
        scale_(flats, recipe.before)
        numbers = self._numbers(recipe, flats)
        self._begin([_in_place(self._communicator.link.allReduce, each, *numbers) for each in flats])
        scale_(flats, recipe.after)

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._reduce_scatter(tensors, owners, arithmetic)
            return
        parts = [(recipe.view(tensor), owner) for tensor, owner in zip(tensors, owners, strict=True) if len(tensor)]
        if recipe.before != 1:
            # Those of others are only read.
            parts = [(flat if owner == self._rank else flat.clone(), owner) for flat, owner in parts]
            scale_([flat for flat, _ in parts], recipe.before)
        numbers = self._numbers(recipe, [flat for flat, _ in parts])
        link = self._communicator.link
        self._begin([_in_place(link.reduce, flat, *numbers, owner) for flat, owner in parts])
        scale_([flat for flat, owner in parts if owner == self._rank], recipe.after)

    def _gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        byte = self._communicator.nccl.dtypes[torch.uint8]
        parts, call = zip(tensors, owners, strict=True), self._communicator.link.broadcast
        self._begin([_in_place(call, tensor, byte, owner) for tensor, owner in parts if len(tensor)])
        yield from ()

    def _alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        byte, link = self._communicator.nccl.dtypes[torch.uint8], self._communicator.link
        receives[self._rank].copy_(sends[self._rank])
        moves = []
        # In this order every part of it that is a group has both ends of what is in it.
        for distance in range(1, len(sends)):
            to, source = (self._rank + distance) % len(sends), (self._rank - distance) % len(sends)
            moves += [(link.send, sends[to], to), (link.recv, receives[source], source)]
        # Nothing is left out before the groups are made, or they would not be the same ones on all ranks.
        for start in range(0, len(moves), MOST_IN_GROUP):
            group = moves[start : start + MOST_IN_GROUP]
            self._begin([(call, part.data_ptr(), len(part), byte, peer) for call, part, peer in group if len(part)])
        yield from ()

    def _numbers(self, recipe: Recipe, flats: Sequence[torch.Tensor]) -> tuple[int, int]:
        """NCCL's numbers of the dtype and of the reduction."""
        nccl = self._communicator.nccl
        return nccl.dtypes[flats[0].dtype] if flats else 0, nccl.ops[recipe.op]

    def _begin(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Put calls (a function of the communicator, and all it is given but the stream) into it, in groups."""
        for start in range(0, len(calls), MOST_IN_GROUP):
            with _LAUNCHING:
                self.check()
                # Before: the first call of a kind connects the ranks, and waits for them.
                begun = time.monotonic()
                with self._communicator.nccl.group():
                    for call, *arguments in calls[start : start + MOST_IN_GROUP]:
                        call(*arguments, self._address)
                self._under_way.append((self.runtime.record(self.stream), begun))

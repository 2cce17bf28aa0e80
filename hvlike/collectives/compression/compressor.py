"""Compressors: the interface, no compression, casts to 16 bits, and the base of those with a memory.

A compressor has `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`. A stateful one reduces a
bucket itself, with the collective calls that an `Exchange` offers: what was not sent of each parameter's gradient is
added to the next (error feedback).
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import home_of, in_host_memory
from hvlike.backends.fusion_buffer import FusionBuffer
from hvlike.collectives.requests.reduction import Operand, reduce_operands
from hvlike.errors import UsageError
from hvlike.transport.loop.coroutine import Coroutine


@runtime_checkable
class CompressorLike(Protocol):
    """The shape of a compressor, whether an object or a class with static methods."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """See Compressor.compress."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """See Compressor.decompress."""


class Compressor:
    """Base of compressors; the methods here change nothing.

    Both methods are local and do not block. Every rank of a reduction must use the same compressor: the dtype and
    shape of what `compress` returns are compared between ranks, its meaning is not.
    Source: horovod.torch.Compressor.
    """

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is to be reduced in place of `tensor`, and a context for `decompress`."""
        return tensor, None

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced `tensor` in the form the original had; `ctx` is what `compress` returned."""
        return tensor

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NoneCompressor(Compressor):
    def __reduce__(self) -> str:
        return "NONE"


class CastCompressor(Compressor):
    """Floating tensors wider than `wire_dtype` travel as `wire_dtype`; all others pass through.

    Sums are still accumulated in float32 by the reduction; only what travels is rounded.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        if not wire_dtype.is_floating_point:
            raise UsageError(f"CastCompressor needs a floating dtype to send as, got {wire_dtype}.")
        self.wire_dtype = wire_dtype

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        passes = not dtype.is_floating_point or dtype.itemsize <= self.wire_dtype.itemsize
        return dtype if passes else self.wire_dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return `tensor` cast to the wire dtype and the dtype it had; unchanged and None if it passes through."""
        dtype = tensor.dtype
        wire = self.cast(dtype)
        return (tensor, None) if wire is dtype else (tensor.to(wire), dtype)

    def decompress(self, tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.wire_dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wire_dtype})"


NONE = NoneCompressor()


Packers = dict[tuple[torch.dtype, tuple[int, ...]], FusionBuffer]  # Each round of a bucket has lengths of its own


class Exchange:
    """The ranks of one reduction, seen by one of them. Every rank asks for the same, in the same order."""

    def __init__(
        self,
        backend: Backend,
        place: tuple[int, int],
        factor: float,
        arithmetic: Callable[[torch.dtype], Arithmetic],
        packers: Packers,
    ) -> None:
        """place: the rank among those of the reduction, and their number."""
        self.rank, self.size = place
        self.factor = factor  # Of a plain sum over the ranks: the factors, and 1 / size for Average
        self._backend = backend
        self._arithmetic = arithmetic
        self._packers = packers

    def allreduce(self, tensors: Sequence[Tensor]) -> Coroutine[None]:
        """Reduce in place with the op and the factors of the reduction; bitwise the same result on every rank."""
        operands = [Operand(tensor, None, home=home_of(self._backend)) for tensor in tensors]

        def reduce(dtype: torch.dtype, flats: list[Tensor]) -> Coroutine[None]:
            packer = self._packers.setdefault((dtype, tuple(map(len, flats))), FusionBuffer())
            return packer.allreduce(self._backend, flats, self._arithmetic(dtype))

        yield from reduce_operands(operands, reduce)

    def share(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """Write each contiguous tensor from the rank `owners[i]` to all others, bit by bit."""
        operands = [Operand(tensor, None, home=home_of(self._backend)) for tensor in tensors]
        if operands:
            yield from self._backend.gather([operand.flat.view(torch.uint8) for operand in operands], owners)
        for operand in operands:
            operand.write_back()

    def are_finite(self, groups: Sequence[Sequence[Tensor]]) -> Coroutine[list[bool]]:
        """For each group whether all elements of its tensors are finite; no thread waits for a GPU meanwhile."""
        if not groups:
            return []
        flags = [torch.stack([tensor.isfinite().all() for tensor in group]).all() for group in groups]
        answers: list[bool] = []

        def read(_: Backend, copies: Sequence[Tensor]) -> Coroutine[None]:
            answers.extend(bool(each) for each in copies[0].tolist())
            yield from ()

        operand = Operand(torch.stack(flags).view(torch.uint8), None, home=home_of(self._backend))
        yield from in_host_memory(self._backend, [operand.flat], read)
        return answers


class Mark(NamedTuple):
    iteration: int = 0
    digest: str = ""


class CompressionStats(NamedTuple):
    """What compression has saved since the compressor was made."""

    compress_rate: float
    """bytes_before / bytes_after; 1 when nothing was reduced yet."""
    bytes_before: int
    """Bytes of all gradients that this rank had to reduce."""
    bytes_after: int
    """Bytes that this rank has contributed to the exchanges in their place."""


class StatefulCompressor(Compressor, ABC):
    """Base of compressors that need several rounds of communication and remember something from step to step.

    They belong to one DistributedOptimizer and are keyed by the names of its parameters. Each rank remembers the
    error of its own gradients, which is different on every rank; what else is remembered is equal on all ranks.
    """

    def __init__(self, *, use_error_feedback: bool) -> None:
        self.use_error_feedback = use_error_feedback
        self.iteration = 0  # Steps that were reduced
        self._errors: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}
        self._next_errors: dict[str, Tensor] = {}
        self._next_shared: dict[str, Tensor] = {}
        self._place: tuple[int, int] | None = None
        self._loaded: Mapping[str, Any] = {}
        self._bytes_before = 0
        self._bytes_after = 0
        self._owner: weakref.ref[object] | None = None

    @abstractmethod
    def reduce(self, names: Sequence[str], tensors: Sequence[Tensor], exchange: Exchange) -> Coroutine[None]:
        """Reduce `tensors` in place; `names` are what their memory is known by. Collective over the exchange."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Refuse: this compressor reduces by itself. Raises: UsageError."""
        raise self._no_single_calls()

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Refuse: this compressor reduces by itself. Raises: UsageError."""
        raise self._no_single_calls()

    @property
    def errors(self) -> dict[str, Tensor]:
        """What earlier steps have left of this rank's gradients, by the name of the parameter."""
        return dict(self._errors)

    def compression_stats(self) -> CompressionStats:
        """Return what was saved so far on this rank. Local. Source: torch's PowerSGDState, which counts elements."""
        rate = self._bytes_before / self._bytes_after if self._bytes_after else 1.0
        return CompressionStats(rate, self._bytes_before, self._bytes_after)

    # -- the steps ------------------------------------------------------------------------------

    def claim(self, owner: object) -> None:
        """Belong to `owner`. Raises: UsageError while another owner is alive: their names would be mixed up."""
        current = self._owner() if self._owner is not None else None
        if current is not None and current is not owner:
            raise UsageError(
                f"{self!r} is used by another DistributedOptimizer already, and its memory belongs to that one's "
                "parameters. Make a compressor for each optimizer."
            )
        self._owner = weakref.ref(owner)

    def commit(self) -> None:
        """All buckets of a step are reduced: what they have put aside is the memory now."""
        self._errors.update(self._next_errors)
        self._shared.update(self._next_shared)
        self.iteration += 1
        self.roll_back()

    def roll_back(self) -> None:
        """Forget what the buckets of an unfinished step have put aside."""
        self._next_errors = {}
        self._next_shared = {}

    def _count(self, before: int, after: int) -> None:
        self._bytes_before += before
        self._bytes_after += after

    def _take_place(self, exchange: Exchange) -> None:
        """Know which rank this is, and take up the errors that it has saved under the same circumstances."""
        place = exchange.rank, exchange.size
        self._errors = self.errors_of(place)
        self._loaded = {}
        self._place = place

    def errors_of(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """This rank's errors as the one at `place` (rank, size), also those that the next step would take up. Local."""
        if self._place is None and self._loaded and self._loaded["size"] == place[1]:
            return dict(self._loaded["errors"].get(place[0], {}))
        return dict(self._errors)

    def load_errors(self, errors: Mapping[str, Tensor], place: tuple[int, int] | None) -> None:
        """Take up errors of this rank's own, as the one at `place`, whatever was loaded before; the rest of the memory
        stays. Local.
        """
        self._errors, self._loaded, self._place = dict(errors), {}, place

    def _with_error(self, name: str, tensor: Tensor) -> Tensor:
        """A new tensor in working precision: the gradient and what earlier steps have left of it."""
        dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        work = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        work.copy_(tensor)
        error = self._errors.get(name)
        if self.use_error_feedback and error is not None and error.shape == work.shape and error.dtype is dtype:
            # One that was loaded may be elsewhere.
            work.add_(error.to(work.device))
        return work

    # -- agreement between ranks ----------------------------------------------------------------

    def mark(self) -> Mark:
        """What must be equal on all ranks, in short."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._shared.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return Mark(self.iteration, digest.hexdigest())

    def align(self, agreed: Mark) -> None:
        """Go on from what the ranks have merged; memories that differ, after a failed step say, start anew."""
        self.iteration = agreed.iteration
        if not agreed.digest:
            self._shared = {}

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as numbers and tensors; empty before the first step. Local.

        `iteration` and `shared` are the same on every rank. `errors` holds the memory of this rank alone, under its
        number among the `size` ranks that reduce together: for an exact continuation every rank saves its own, or
        one file holds them all (hvlike.gather_optimizer_state).
        """
        if not self.iteration and not self._errors and not self._loaded:
            return {}
        if self._place is None:
            size, errors = self._loaded.get("size", 1), dict(self._loaded.get("errors", {}))
        else:
            rank, size = self._place
            errors = {rank: dict(self._errors)}
        return self.shared_state() | {"size": size, "errors": errors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a memory that was saved; an empty dict: start anew. Local.

        A rank takes the errors that were saved under its own number by as many ranks as there are now; a rank that
        finds none starts without error.
        Raises: UsageError for anything that is not what state_dict() returns.
        """
        if state_dict and not {"iteration", "shared", "size", "errors"} <= set(state_dict):
            raise UsageError(
                f"{type(self).__name__}.load_state_dict expects what its state_dict() returned, with the keys "
                f"iteration, shared, size and errors; got the keys {sorted(map(str, state_dict))}."
            )
        self.roll_back()
        self._errors = {}
        self._place = None
        self._loaded = dict(state_dict)
        self.load_shared(state_dict or {"iteration": 0, "shared": {}})

    def shared_state(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "shared": dict(self._shared)}

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Take up another rank's `shared_state`; this rank keeps its own errors."""
        self.iteration = int(state["iteration"])
        self._shared = {name: tensor.detach().clone() for name, tensor in state["shared"].items()}

    def __getstate__(self) -> dict[str, Any]:
        # An owner is not copied with what it owns, nor is half a step.
        return self.__dict__ | {"_owner": None, "_next_errors": {}, "_next_shared": {}}

    def __repr__(self) -> str:
        # The same on every rank that was given the same, which is what ranks compare.
        options = ((name, getattr(self, name, None)) for name in inspect.signature(type(self)).parameters)
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in options if value is not None)})"

    def _no_single_calls(self) -> UsageError:
        return UsageError(
            f"{type(self).__name__} reduces in several rounds and remembers errors by parameter: it belongs to "
            f"DistributedOptimizer(compression=...). Use Compression.fp16 or .bf16 in a single call."
        )


def merge_marks(marks: Sequence[Mark]) -> Mark:
    """What all ranks can go on from: the highest count, and the memory only if it is the same everywhere."""
    first = marks[0]
    same = all(each == first for each in marks)
    return Mark(max(each.iteration for each in marks), first.digest if same else "")

"""Communication hooks: how a DistributedDataParallel reduces its gradients. Those here, torch's, and the user's.

Registered as they are, hooks of this file are settings of the planned reduction, which runs beside backward and needs
no copy. A user's hook is called bucket by bucket at the end of backward, by a HookedReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from inspect import getclosurevars, signature
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.futures import Future

from hvlike.backends.operation import Operation
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.compression import Compression, CompressionStats, CompressorLike, PowerSGD, StatefulCompressor
from hvlike.collectives.requests.plan import fill_buckets
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Max
from hvlike.collectives.session.context import current
from hvlike.errors import UsageError, WrongTypeError
from hvlike.training.gradients.grad_state import gradient_dtype
from hvlike.training.gradients.reduction import Reduction, ranks_of_group
from hvlike.transport.memory.dtypes import dtype_name
from hvlike.transport.memory.own_memory import check_gradients


class GradBucket:
    """Gradients that are reduced together, in the order in which backward usually finishes them.

    Args:
        index: Its place among the buckets of the module.
        parameters: The parameters.
        gradients: Their gradients: dense ones of one dtype, or a single sparse one.
        last: It is the last one of the backward pass.

    Source: torch.distributed.GradBucket.
    """

    def __init__(self, index: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._shapes = [gradient.shape for gradient in gradients]
        self._last = last
        self.absent: Collection[Tensor] = ()  # Parameters for which no rank has a gradient: there are zeros for them
        (first, *others) = gradients
        self._buffer = first if first.is_sparse else torch.cat([each.reshape(-1) for each in (first, *others)])

    def index(self) -> int:
        """Its place among the buckets of the module."""
        return self._index

    def buffer(self) -> Tensor:
        """All its gradients as one tensor of shape (N), a copy of this rank's own; or the sparse one, as it is."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer.

        Args:
            tensor: Shape (N).
        """
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter, of its shape."""
        return split(self._buffer, self._shapes)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the same order."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last one of the backward pass."""
        return self._last


def split(buffer: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    if buffer.is_sparse:
        return [buffer]
    parts = torch.split(buffer.reshape(-1), [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def hook_result(returned: Any) -> Any:
    """Return the value of a Future, a Handle or a list of one, or what the hook has returned itself. Blocks."""
    value = returned
    if isinstance(returned, Operation):
        value = returned.result()
    elif isinstance(returned, torch._C.Future):
        # `then` makes futures of this base class. This rank's loop runs meanwhile.
        loop = current().fabric.loop
        if not returned.done():
            returned.add_done_callback(lambda _: loop.post(lambda: None))
            loop.wait(returned.done)
        value = returned.value()
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return value


Hook = Callable[[Any, GradBucket], "Future[Any] | Operation | Tensor"]


@dataclass(eq=False)
class HookedReducer:
    """Calls the hook for every bucket, all ranks alike. The buckets follow from the parameters: nothing is agreed."""

    wants_marks: ClassVar[bool] = False
    active: ClassVar[int] = 0
    name: str
    parameters: Sequence[Tensor]
    hook: Hook
    state: Any
    process_set: ProcessSet | None
    bucket_bytes: int | None
    absent: Collection[int] = ()

    def mark_ready(self, index: int, tensor: Tensor) -> None:
        """Do nothing: all hooks are called at the end."""

    def drop(self) -> None:
        """Do nothing: nothing was agreed."""

    def finish(self, tensors: Sequence[Tensor], missing: Collection[int] = ()) -> dict[int, Tensor]:
        """Reduce the gradients by the hook; return sparse results by index."""
        check_gradients(tensors, lambda place: f"{self.name}.{place}")
        gradients = [tensor.detach() for tensor in tensors]
        self.absent = self._of_no_rank(missing)
        buckets = self._buckets(gradients)
        started = [self.hook(self.state, bucket) for _, bucket in buckets]
        replaced: dict[int, Tensor] = {}
        for (indices, bucket), pending in zip(buckets, started, strict=True):
            result = self._result(pending, bucket)
            for index, part in zip(indices, split(result, [gradients[each].shape for each in indices]), strict=True):
                if gradients[index].is_sparse:
                    replaced[index] = part
                else:
                    gradients[index].copy_(part)
        return replaced

    def _of_no_rank(self, missing: Collection[int]) -> Collection[int]:
        """Which gradients no rank has. Before the hooks, which may make an optimizer's step. Collective; blocks."""
        present = torch.ones(len(self.parameters), dtype=torch.uint8, device="cpu")
        present[list(missing)] = 0
        found = allreduce(present, op=Max, name=f"{self.name}.present", process_set=self.process_set)
        return (found == 0).nonzero().view(-1).tolist()

    def _buckets(self, gradients: Sequence[Tensor]) -> list[tuple[list[int], GradBucket]]:
        order = range(len(gradients) - 1, -1, -1)
        # Each sparse gradient is a kind of its own: it shares no bucket.
        kinds = [f"sparse {i}" if each.is_sparse else dtype_name(each.dtype) for i, each in enumerate(gradients)]
        sizes = [each.numel() * gradient_dtype(each).itemsize for each in self.parameters]
        buckets: list[tuple[list[int], GradBucket]] = []
        for indices in fill_buckets([[index] for index in order], sizes, kinds, self.bucket_bytes or 25 << 20):
            last = indices[-1] == 0
            held = [self.parameters[index] for index in indices]
            bucket = GradBucket(len(buckets), held, [gradients[index] for index in indices], last=last)
            bucket.absent = {self.parameters[index] for index in indices if index in self.absent}
            buckets.append((indices, bucket))
        return buckets

    def _result(self, pending: Any, bucket: GradBucket) -> Tensor:
        value = hook_result(pending)
        if not isinstance(value, Tensor) or value.numel() != bucket.buffer().numel():
            got = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"The communication hook of {self.name!r} must return a tensor of {bucket.buffer().numel()} elements, "
                f"a Future or an hvlike Handle of one, for bucket {bucket.index()}; got {got}."
            )
        return value


class PowerSGDState:
    """The state of `powerSGD_hook` for one module: its options, and what it remembers from step to step.

    Args:
        process_group: Accepted for compatibility with torch and ignored: the ranks are those of the module.
        matrix_approximation_rank: Rank of the approximations; a higher rank is more exact and slower.
        start_powerSGD_iter: How many steps are reduced in full before compression begins.
        min_compression_rate: A gradient is compressed only where that saves at least this factor.
        use_error_feedback: Add what compression has left out of a step to the next gradients.
        warm_start: Start each step from the approximation of the one before.
        orthogonalization_epsilon: Added to lengths of vectors before they are divided by.
        random_seed: Seed of the first approximation, the same on every rank.
        compression_stats_logging_frequency: Accepted without effect: call compression_stats() at any time.
        batch_tensors_with_same_shape: Accepted without effect: all matrices of a bucket travel together.

    Raises:
        UsageError: A value is wrong.

    Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState.
    """

    def __init__(
        self,
        process_group: ProcessSet | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0.0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self.process_group = process_group
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compressor = PowerSGD(
            matrix_approximation_rank=matrix_approximation_rank,
            start_powerSGD_iter=start_powerSGD_iter,
            min_compression_rate=min_compression_rate,
            use_error_feedback=use_error_feedback,
            warm_start=warm_start,
            orthogonalization_epsilon=orthogonalization_epsilon,
            random_seed=random_seed,
        )

    def compression_stats(self) -> CompressionStats:
        """Return how much was saved so far on this rank, in bytes; torch counts elements. Local."""
        return self.compressor.compression_stats()


def hooked_reducer(
    hook: Hook, state: Any, name: str, parameters: Sequence[Tensor], reduction: Reduction
) -> HookedReducer:
    """Return the reducer of these parameters that calls `hook(state, bucket)`."""
    return HookedReducer(name, parameters, hook, state, reduction.process_set, reduction.bucket_bytes)


def _averages(process_set: ProcessSet | None, bucket: GradBucket, compression: CompressorLike) -> Future[Tensor]:
    key = f"communication hook, bucket {bucket.index()}"
    ranks = ranks_of_group(process_set)
    future: Future[Tensor] = torch.futures.Future()
    future.set_result(allreduce(bucket.buffer(), op=Average, name=key, compression=compression, process_set=ranks))
    return future


def allreduce_hook(process_set: ProcessSet | None, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as they are. Collective; blocks.

    Args:
        process_set: The state of the hook: the ranks; None for all.
        bucket: The gradients.

    Returns:
        A future of the averages, shape (N).

    Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
    """
    return _averages(process_set, bucket, Compression.none)


def fp16_compress_hook(process_set: ProcessSet | None, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as float16. Collective; blocks.

    Args:
        process_set: The state of the hook: the ranks; None for all.
        bucket: The gradients.

    Returns:
        A future of the averages, shape (N).

    Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
    """
    return _averages(process_set, bucket, Compression.fp16)


def bf16_compress_hook(process_set: ProcessSet | None, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as bfloat16. Collective; blocks.

    Args:
        process_set: The state of the hook: the ranks; None for all.
        bucket: The gradients.

    Returns:
        A future of the averages, shape (N).

    Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
    """
    return _averages(process_set, bucket, Compression.bf16)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as low-rank approximations. You can only register it.

    Args:
        state: The PowerSGDState.
        bucket: The gradients.

    Returns:
        Nothing: a call raises UsageError.

    Raises:
        UsageError: Always.

    Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
    """
    raise UsageError("powerSGD_hook can only be registered: ddp.register_comm_hook(PowerSGDState(...), powerSGD_hook).")


def compression_of(state: Any, hook: object) -> CompressorLike | None:
    """Return the compression that a hook of this file, or torch's of the same name, stands for; None for others."""
    place, name = getattr(hook, "__module__", None) or "", getattr(hook, "__name__", "")
    if place.startswith(_OF_TORCH):
        # Those reduce over a process group of torch.distributed: with one as their state they stay as they are.
        if name == "powerSGD_hook" and getattr(state, "process_group", hook) is None:
            options = {each: getattr(state, each) for each in signature(PowerSGD).parameters if each != "random_seed"}
            # The first word of a generator's state is its seed.
            state = PowerSGDState(random_seed=int(state.rng.get_state()[1][0]), **options)
            hook = powerSGD_hook
        elif name in _SAME_NAMES and state is None:
            hook = _SAME_NAMES[name]
        elif name in _NEED_A_GROUP and not torch.distributed.is_initialized():
            raise UsageError(
                f"{name} of torch reduces over a process group of torch.distributed, and none is there. Register "
                f"{', '.join(sorted({*_SAME_NAMES, 'powerSGD_hook'}))} of hvlike.nn, a hook of your own that calls "
                'hvlike, or start torch.distributed over hvlike first: torch.distributed.init_process_group("hvlike").'
            )
        elif name in _WRAPPERS and isinstance(hook, FunctionType):
            return _compression_of_wrapper(state, name, getclosurevars(hook).nonlocals["hook"])
    if hook is powerSGD_hook:
        compressor = getattr(state, "compressor", state)
        if not isinstance(compressor, StatefulCompressor):
            raise WrongTypeError(f"powerSGD_hook needs a PowerSGDState as its state, got {type(state).__name__}.")
        return compressor
    return _COMPRESSION.get(hook)


def _compression_of_wrapper(state: Any, name: str, inner: object) -> CompressorLike | None:
    compression = compression_of(state, inner)
    if compression is Compression.none:
        return _WRAPPERS[name]
    needs_group = inner is not powerSGD_hook and torch.distributed.is_initialized()
    if isinstance(compression, StatefulCompressor) and not needs_group:
        raise UsageError(
            f"{name} of torch cannot go around powerSGD_hook here: hvlike sends low-rank approximations in the type of "
            "the gradients. Register powerSGD_hook alone, which sends less than a cast would; or start "
            'torch.distributed over hvlike, torch.distributed.init_process_group("hvlike"), and register both of torch.'
        )
    return None


_COMPRESSION: dict[object, CompressorLike] = {
    allreduce_hook: Compression.none,
    fp16_compress_hook: Compression.fp16,
    bf16_compress_hook: Compression.bf16,
}
_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_SAME_NAMES = {hook.__name__: hook for hook in (allreduce_hook, fp16_compress_hook, bf16_compress_hook)}
_WRAPPERS: dict[str, CompressorLike] = {
    "fp16_compress_wrapper_hook": Compression.fp16,
    "bf16_compress_wrapper_hook": Compression.bf16,
}
_NEED_A_GROUP = {
    *_SAME_NAMES,
    "powerSGD_hook",
    "batched_powerSGD_hook",
    "post_localSGD_hook",
    "quantization_pertensor_hook",
    "quantization_perchannel_hook",
}

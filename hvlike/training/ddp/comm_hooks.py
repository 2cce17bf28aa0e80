"""Communication hooks: how a DistributedDataParallel reduces its gradients. Those here, torch's, and the user's.

Registered as they are, hooks of this file are settings of the planned reduction, which runs beside backward and needs
no copy. A user's hook is called bucket by bucket at the end of backward, by a HookedReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from inspect import getclosurevars
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.futures import Future

from hvlike.backends.operation import Operation
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.compression import Compression, CompressorLike
from hvlike.collectives.requests.plan import fill_buckets
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Max
from hvlike.collectives.session.context import current
from hvlike.errors import UsageError
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
        started: Iterable[Any] = (self.hook(self.state, bucket) for _, bucket in buckets)
        if not _is_of_torch(self.hook):
            # Torch's go on in callbacks: those of several buckets at once would come in another order on each rank.
            started = list(started)
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


def compression_of(state: Any, hook: object) -> CompressorLike | None:
    """Return the compression that a hook of this file, or torch's of the same name, stands for; None for others."""
    name = getattr(hook, "__name__", "")
    if _is_of_torch(hook):
        # Those reduce over a process group of torch.distributed: with one as their state they stay as they are.
        if name in _SAME_NAMES and state is None:
            hook = _SAME_NAMES[name]
        elif name in _NEED_A_GROUP and not torch.distributed.is_initialized():
            raise UsageError(
                f"{name} of torch reduces over a process group of torch.distributed, and none is there. Register "
                f"{', '.join(sorted(_SAME_NAMES))} of hvlike.nn, a hook of your own that calls hvlike, or start "
                ' torch.distributed over hvlike first: torch.distributed.init_process_group("hvlike").'
            )
        elif name in _WRAPPERS and isinstance(hook, FunctionType):
            inner = compression_of(state, getclosurevars(hook).nonlocals["hook"])
            return _WRAPPERS[name] if inner is Compression.none else None
    return _COMPRESSION.get(hook)


def _is_of_torch(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.algorithms.ddp_comm_hooks.")


_COMPRESSION: dict[object, CompressorLike] = {
    allreduce_hook: Compression.none,
    fp16_compress_hook: Compression.fp16,
    bf16_compress_hook: Compression.bf16,
}
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

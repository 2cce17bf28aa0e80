"""Reducing gradients by a communication hook of the user, bucket by bucket, at the end of backward.

Here are GradBucket, which a hook is given, the value of what it returns, and the reducer that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.plan import fill_buckets
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average
from hvlike.collectives.requests.request import Handle
from hvlike.collectives.session.context import current
from hvlike.errors import UsageError
from hvlike.transport.memory.dtypes import dtype_name


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
    if isinstance(returned, Handle):
        value = returned.result()
    elif isinstance(returned, torch._C.Future):
        # `then` makes futures of this base class.
        value = _wait_for(returned)
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return value


def _wait_for(future: torch._C.Future[Any]) -> Any:
    """Return the value of a future or raise its error; this rank's loop runs meanwhile."""
    loop = current().fabric.loop
    if not future.done():
        future.add_done_callback(lambda _: loop.post(lambda: None))
        loop.wait(future.done)
    return future.value()


Hook = Callable[[Any, GradBucket], "Future[Any] | Handle | Tensor"]


class HookedReducer:
    """Calls the hook for every bucket, then waits for what it has returned; all ranks alike.

    The buckets follow from the parameters, in reverse order: no agreement is needed.
    """

    wants_marks = False
    active = 0

    def __init__(
        self,
        name: str,
        parameters: Sequence[Tensor],
        hook: Hook,
        state: Any,
        process_set: ProcessSet | None,
        bucket_bytes: int | None,
    ) -> None:
        self.name = name
        self._parameters = list(parameters)
        self._hook = hook
        self._state = state
        self._process_set = process_set
        self._limit = bucket_bytes or 25 << 20

    def mark_ready(self, index: int, tensor: Tensor) -> None:
        """Do nothing: all hooks are called at the end."""

    def close(self) -> None:
        """Do nothing: nothing was agreed."""

    def finish(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Reduce the gradients by the hook, and tensors after them as averages; return sparse results by index."""
        count = len(self._parameters)
        gradients = [tensor.detach() for tensor in tensors[:count]]
        buckets = self._buckets(gradients)
        started = [self._hook(self._state, bucket) for _, bucket in buckets]
        replaced: dict[int, Tensor] = {}
        for (indices, bucket), pending in zip(buckets, started, strict=True):
            result = self._result(pending, bucket)
            for index, part in zip(indices, split(result, [gradients[each].shape for each in indices]), strict=True):
                if gradients[index].is_sparse:
                    replaced[index] = part
                else:
                    gradients[index].copy_(part)
        for number, tensor in enumerate(tensors[count:]):
            name = f"{self.name}.extra.{number}"
            tensor.copy_(allreduce(tensor, op=Average, name=name, process_set=self._process_set))
        return replaced

    def _buckets(self, gradients: Sequence[Tensor]) -> list[tuple[list[int], GradBucket]]:
        order = range(len(gradients) - 1, -1, -1)
        # Each sparse gradient is a kind of its own: it shares no bucket.
        kinds = [f"sparse {i}" if each.is_sparse else dtype_name(each.dtype) for i, each in enumerate(gradients)]
        sizes = [parameter.nbytes for parameter in self._parameters]
        filled = fill_buckets([[index] for index in order], sizes, kinds, self._limit)
        return [
            (
                indices,
                GradBucket(
                    number,
                    [self._parameters[index] for index in indices],
                    [gradients[index] for index in indices],
                    last=number == len(filled) - 1,
                ),
            )
            for number, indices in enumerate(filled)
        ]

    def _result(self, pending: Any, bucket: GradBucket) -> Tensor:
        value = hook_result(pending)
        if not isinstance(value, Tensor) or value.numel() != bucket.buffer().numel():
            got = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"The communication hook of {self.name!r} must return a tensor of {bucket.buffer().numel()} elements, "
                f"a Future or a hvlike Handle of one, for bucket {bucket.index()}; got {got}."
            )
        return value

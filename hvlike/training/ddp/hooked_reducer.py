"""Reducing gradients by a function of the user, bucket by bucket, at the end of backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from hvlike.collectives.allreduce import allreduce
from hvlike.collectives.handles import Handle
from hvlike.collectives.plan import fill_buckets
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import Average
from hvlike.errors import UsageError
from hvlike.training.ddp.grad_bucket import GradBucket, split
from hvlike.training.ddp.hook_results import value_of
from hvlike.transport.dtypes import dtype_name

Hook = Callable[[Any, GradBucket], "Future[Any] | Handle | Tensor"]

DEFAULT_BUCKET_BYTES = 25 << 20


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
        self._limit = bucket_bytes or DEFAULT_BUCKET_BYTES

    def mark_ready(self, index: int, tensor: Tensor) -> None:
        """Nothing begins before the end."""

    def close(self) -> None:
        """Nothing was agreed."""

    def finish(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Reduce the gradients as the hook does, and what comes after them as averages. What the hook does may block.

        Returns sparse gradients, which are not written in place, by index.
        Raises: what the hook raises; UsageError for what it may not return.
        """
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
        # A kind of its own for each sparse one: it shares no bucket.
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
        """Wait for what the hook has returned, and look at it."""
        value = value_of(pending)
        if not isinstance(value, Tensor) or value.numel() != bucket.buffer().numel():
            got = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"The communication hook of {self.name!r} must return a tensor of {bucket.buffer().numel()} elements, "
                f"a Future or a hvlike Handle of one, for bucket {bucket.index()}; got {got}."
            )
        return value

"""TopK: only the largest elements of a gradient are sent; the rest waits in the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvlike.collectives.compression.compressor import Exchange, StatefulCompressor
from hvlike.errors import UsageError
from hvlike.transport.loop.coroutine import Coroutine, Wait


@dataclass(eq=False)
class _Work:
    name: str
    tensor: Tensor
    error: Tensor
    values: Tensor
    places: Tensor


class TopK(StatefulCompressor):
    """The largest elements (by magnitude) of the gradients of one DistributedOptimizer, with error feedback.

    Every rank chooses by itself; the result is the sum of what all ranks have sent, added in the order of the ranks,
    so bitwise the same on every rank. A tensor of which all elements would be sent is reduced in full. float16 and
    bfloat16 are computed and sent in float32. A step whose gradients are not finite is not remembered. With a
    GradScaler the errors are those of scaled gradients.

    Args:
        ratio: The part of each tensor's elements that is sent, above 0 and at most 1; at least one element is sent.
        k: Their number instead; give exactly one of the two.
        use_error_feedback: Add what was not sent to the gradient of the next step.

    Raises:
        UsageError: Wrong arguments.

    Source: Stich, Cordonnier, Jaggi, Sparsified SGD with memory, NeurIPS 2018 (arXiv 1809.07599).
    """

    def __init__(self, ratio: float | None = None, k: int | None = None, use_error_feedback: bool = True) -> None:
        super().__init__(use_error_feedback=use_error_feedback)
        if (ratio is None) == (k is None):
            raise UsageError(f"TopK: expected either ratio or k, got ratio={ratio!r} and k={k!r}.")
        if ratio is not None and not 0 < ratio <= 1:
            raise UsageError(f"TopK: ratio must be > 0 and <= 1, got {ratio!r}.")
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise UsageError(f"TopK: k must be a whole number >= 1, got {k!r}.")
        self.ratio = ratio
        self.k = k

    def chosen(self, elements: int) -> int:
        wanted = self.k if self.k is not None else math.ceil((self.ratio or 0.0) * elements)
        return min(elements, max(1, wanted))

    def reduce(self, names: Sequence[str], tensors: Sequence[Tensor], exchange: Exchange) -> Coroutine[None]:
        """Reduce in place, in full where all elements would be sent. Collective over the exchange."""
        self._take_place(exchange)
        plain: list[Tensor] = []
        works: list[_Work] = []
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype.is_floating_point and self.chosen(tensor.numel()) < tensor.numel():
                works.append(self._begin(name, tensor))
                yield Wait.AGAIN
            else:
                plain.append(tensor)
        yield from exchange.allreduce(plain)
        sent = 0
        for dtype in dict.fromkeys(work.values.dtype for work in works):
            same = [work for work in works if work.values.dtype is dtype]
            sent += yield from self._sum(same, exchange)
        self._count(sum(each.nbytes for each in tensors), sum(each.nbytes for each in plain) + sent)

    def _begin(self, name: str, tensor: Tensor) -> _Work:
        work = self._with_error(name, tensor.reshape(-1))
        count = self.chosen(tensor.numel())
        places = work.abs().topk(count, sorted=False).indices.sort().values
        values = work[places]
        # What is sent leaves the memory exactly.
        work.index_fill_(0, places, 0)
        return _Work(name, tensor, work, values, places)

    def _sum(self, works: Sequence[_Work], exchange: Exchange) -> Coroutine[int]:
        """Gather what all ranks have chosen of tensors of one dtype, and add it up; how many bytes this rank sent."""
        wide = max(work.tensor.numel() for work in works) > torch.iinfo(torch.int32).max
        place_dtype = torch.int64 if wide else torch.int32
        own_values = torch.cat([work.values for work in works])
        own_places = torch.cat([work.places for work in works]).to(place_dtype)
        mine = [rank == exchange.rank for rank in range(exchange.size)]
        values = [own_values if each else torch.empty_like(own_values) for each in mine]
        places = [own_places if each else torch.empty_like(own_places) for each in mine]
        yield from exchange.share([*values, *places], [*range(exchange.size)] * 2)
        counts = [len(work.values) for work in works]
        parts = [
            (torch.split(each_values, counts), torch.split(each_places, counts))
            for each_values, each_places in zip(values, places, strict=True)
        ]
        finite = yield from exchange.are_finite([[each[0][index] for each in parts] for index in range(len(works))])
        for index, work in enumerate(works):
            self._end(work, [(each[0][index], each[1][index]) for each in parts], exchange.factor, finite[index])
            yield Wait.AGAIN
        return own_values.nbytes + own_places.nbytes

    def _end(self, work: _Work, parts: Sequence[tuple[Tensor, Tensor]], factor: float, finite: bool) -> None:
        total = torch.zeros(work.tensor.numel(), dtype=work.values.dtype, device=work.values.device)
        for values, places in parts:
            total.index_add_(0, places, values)
        work.tensor.copy_(total.mul_(factor).view(work.tensor.shape))
        if finite and self.use_error_feedback:
            self._next_errors[work.name] = work.error

"""SyncBatchNorm, and the conversion of a model to it.

Batch normalisation by the statistics of all ranks' batches, and its derivative.

With n[r] values a channel on rank r, their mean m[r] and the squares' sum around it M[r], the whole batch has

    n = sum n[r],  m = sum n[r] m[r] / n,  M = sum M[r] + sum n[r] (m[r] - m)^2

(Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"). M[r] is
taken around the rank's own mean, so no large numbers cancel. Only the spread of the means is left, which float64 holds
for values of up to 32 bits as a difference of sums. float64 values have no wider type: their spread is summed around
the mean itself, once that is known.

With n values a channel over all ranks, x^ = (x - m) / s and y = w x^ + b, and g = dL/dy, L summed over the ranks:

    dL/dx = w / s (g - sum g / n - x^ sum (g x^) / n)      sums over all ranks: one allreduce
    dL/dw = sum (g x^),  dL/db = sum g                      sums over this rank, to be averaged like all gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvlike.collectives.api.allreduce import allreduce_
from hvlike.collectives.controller.tensor_queue import AutomaticNames
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Sum
from hvlike.collectives.session.context import current
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import UsageError
from hvlike.training.gradients.reduction import ranks_of_group
from hvlike.untraced import traced, untraced


class BatchStatistics(NamedTuple):
    """Statistics over all ranks, float64: of shape (C), one of each channel, but for `total`."""

    total: Tensor  # 0-dim: how many values each channel has
    mean: Tensor
    squares: Tensor  # Sum of the squared distances from the mean


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def channel_dimensions(values: Tensor) -> list[int]:
    return [0, *range(2, values.dim())]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """(C) as (1, C, 1, ...), to be used with values of as many dimensions as `like`."""
    return vector.reshape(1, -1, *[1] * (like.dim() - 2))


def local_sums(values: Tensor) -> Tensor:
    """This rank's part of the sum over ranks, [n, n m, M + n m^2]: (1 + 2C), float64. (N, C, ...) may be empty."""
    channels = values.shape[1]
    count = values.numel() // channels
    sums = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    if count:
        exact = values.to(computing_dtype(values.dtype))
        dimensions = channel_dimensions(values)
        mean = exact.mean(dimensions)
        centered = exact - per_channel(mean, exact)
        # The rounding error of the mean: the distances are exactly those from mean + rest.
        rest = centered.mean(dimensions).to(torch.float64)
        mean = mean.to(torch.float64) + rest
        squares = centered.square_().sum(dimensions).to(torch.float64) - count * rest.square()
        sums[:1].fill_(count)  # An assignment would copy from the host, which waits for a GPU then
        sums[1 : 1 + channels] = count * mean
        sums[1 + channels :] = squares + count * mean.square()
    return sums


def reduce_statistics(values: Tensor, name: str, process_set: ProcessSet | None) -> BatchStatistics:
    """The statistics over all ranks of (N, C, ...): one allreduce, two for float64. Collective; blocks."""
    values = values.detach()
    sums = allreduce_(local_sums(values), name=f"{name}.forward", op=Sum, process_set=process_set)
    count, channels = sums[0], values.shape[1]
    mean = sums[1 : 1 + channels] / count.clamp(min=1)
    if values.dtype is torch.float64:
        squares = (values - per_channel(mean, values)).square_().sum(channel_dimensions(values))
        squares = allreduce_(squares, name=f"{name}.forward.squares", op=Sum, process_set=process_set)
    else:
        squares = (sums[1 + channels :] - count * mean.square()).clamp(min=0)
    return BatchStatistics(count, mean, squares)


@untraced
class Normalization(torch.autograd.Function):
    """Normalises by given statistics, which are a function of the values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: BatchStatistics,
        eps: float,
        name: str,
        process_set: ProcessSet | None,
    ) -> Tensor:
        dtype = computing_dtype(values.dtype)
        mean = statistics.mean.to(dtype)
        inverse = torch.rsqrt(statistics.squares / statistics.total + eps).to(dtype)
        scale = inverse if weight is None else inverse * weight.to(dtype)
        result = (values.to(dtype) - per_channel(mean, values)).mul_(per_channel(scale, values))
        if bias is not None:
            result += per_channel(bias.to(dtype), values)
        ctx.save_for_backward(values, weight, bias, mean, inverse, statistics.total)
        ctx.name, ctx.process_set = name, process_set
        return result.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Collective like the forward pass, unless the values need no gradient."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"{ctx.name} has no second derivative: run backward without create_graph, or use a layer of local "
                "statistics (torch.nn.BatchNorm1d, 2d, 3d) here."
            )
        values, weight, bias, mean, inverse, count = ctx.saved_tensors
        dtype, dimensions = mean.dtype, channel_dimensions(values)
        incoming = gradients[0].to(dtype)
        normalized = (values.to(dtype) - per_channel(mean, values)).mul_(per_channel(inverse, values))
        sums = torch.stack([incoming.sum(dimensions), (incoming * normalized).sum(dimensions)])
        # Copies: views of one tensor would change together when gradients are accumulated.
        to_bias, to_weight = (part.clone() for part in sums)
        to_values = None
        if ctx.needs_input_grad[0]:
            allreduce_(sums, name=f"{ctx.name}.backward", op=Sum, process_set=ctx.process_set)
            mean_incoming, mean_product = sums / count.clamp(min=1).to(dtype)
            scale = inverse if weight is None else inverse * weight.to(dtype)
            to_values = incoming - per_channel(mean_incoming, values)
            to_values -= normalized.mul_(per_channel(mean_product, values))
            to_values = to_values.mul_(per_channel(scale, values)).to(values.dtype)
        return (
            to_values,
            to_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            to_bias.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )


normalize: Callable[..., Tensor] = Normalization.apply


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of inputs with 2 or more dimensions, over the batches of all ranks as if they were one.

    In training the statistics are those of all ranks, whose batches may differ in size; a rank with an empty batch,
    of shape (0, C, ...), takes part. Running statistics become those of one process with the whole batch, the same
    bits on every rank. Inputs of float16 and bfloat16 are normalised in float32. Tensors stay on their device.
    In evaluation nothing is communicated, so one rank may evaluate alone. torch.compile does not trace training.

    Forward in training is collective and blocks: every rank of the set calls the layer equally often, and layers in the
    same order. So is backward, unless the input needs no gradient.

    Args:
        num_features: C, the size of dimension 1 of inputs.
        eps: Added to the variance.
        momentum: Weight of a new batch in running statistics; None: their plain average.
        affine: Have parameters weight and bias, of shape (C).
        track_running_stats: Have running statistics, which evaluation uses.
        process_set: The ranks to normalise over, or a group of torch.distributed over hvlike. Default: all.
        device: Of parameters and buffers.
        dtype: Of parameters and buffers.

    Raises:
        UsageError: (a ValueError) An input has wrong dimensions, or one value a channel over all ranks in training.
        ShapeMismatchError: On every rank: ranks have different numbers of features.
        NotInitializedError: Training without init().

    Gradient: to the input, of the sum of all ranks' losses; to weight and bias, this rank's part of it, which a
    DistributedOptimizer averages like all others. No second derivative: UsageError.
    Source: torch.nn.SyncBatchNorm; horovod.torch.SyncBatchNorm; Ioffe and Szegedy 2015, "Batch Normalization".
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set: ProcessSet | None = ranks_of_group(process_set)

    @traced
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise a batch; see the class.

        Args:
            input: Shape (N, C, ...), a floating-point dtype.

        Returns:
            A tensor of the same shape and dtype.
        """
        self._check_input_dim(input)
        if self.training:
            return self._train(input)
        return functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.running_mean is None,
            eps=self.eps,
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet | None = None) -> nn.Module:
        """Call hvlike.convert_sync_batchnorm.

        Args:
            module: The model, changed in place.
            process_set: The ranks the new layers normalise over. Default: all.

        Returns:
            The model, or the new layer if `module` is a batch normalisation itself.
        """

        return convert_sync_batchnorm(module, process_set)

    def extra_repr(self) -> str:
        own = "" if self.process_set is None else f", process_set={self.process_set}"
        return f"{super().extra_repr()}{own}"  # type: ignore[no-untyped-call]  # torch's has no annotations

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm: expected {self.num_features} channels in dimension 1 (num_features), got "
                f"{input.shape[1]} in an input of shape {list(input.shape)}."
            )
        if not input.is_floating_point():
            raise UsageError(f"SyncBatchNorm: expected an input of floating point numbers, got {input.dtype}.")

    @untraced
    def _train(self, values: Tensor) -> Tensor:
        set_state = current().find_set(self.process_set, "SyncBatchNorm")
        name = _name_of(self, set_state)
        statistics = reduce_statistics(values, name, self.process_set)
        # A rank with more than one value need not look: on a GPU that would wait for the device.
        if values.numel() <= values.shape[1] and int(statistics.total) == 1:
            raise UsageError(
                "Expected more than 1 value per channel when training, got 1 over all ranks; input size of this rank "
                f"is {list(values.shape)}."
            )
        self._track(statistics)
        return normalize(values, self.weight, self.bias, statistics, self.eps, name, self.process_set)

    @torch.no_grad()
    def _track(self, statistics: BatchStatistics) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None:
            momentum = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, found in (
            (self.running_mean, statistics.mean),
            (self.running_var, statistics.squares / (statistics.total - 1)),
        ):
            exact = running.to(torch.float64)
            moved = exact + momentum * (found - exact)
            running.copy_(torch.where(statistics.total > 0, moved, exact))


_names: WeakKeyDictionary[nn.Module, tuple[AutomaticNames, str]] = WeakKeyDictionary()
"""The name that ranks match a layer by, and the counter it came from. Not kept in the layer: a copy needs another."""


def _name_of(layer: nn.Module, set_state: ProcessSetState) -> str:
    """Return the name of a layer in the running job, given at its first training pass, in one order on all ranks."""
    giver = set_state.controller.names
    known = _names.get(layer)
    if known is None or known[0] is not giver:
        known = _names[layer] = giver, giver.next("SyncBatchNorm").replace("noname", "SyncBatchNorm")
    return known[1]


def convert_sync_batchnorm(module: nn.Module, process_set: ProcessSet | None = None) -> nn.Module:
    """Replace every BatchNorm1d, 2d, 3d and torch.nn.SyncBatchNorm in a model by an hvlike.SyncBatchNorm.

    Parameters and buffers are the same objects as before, so an optimizer made earlier still has them; a layer that is
    used in several places stays one layer; training flags are kept. Other layers are left alone. Hooks of a replaced
    layer are not taken over. Local.

    Args:
        module: The model, changed in place.
        process_set: The ranks the new layers normalise over. Default: all.

    Returns:
        The model, or the new layer if `module` is a batch normalisation itself.

    Raises:
        UsageError: A lazy layer does not know its number of features yet.

    Source: torch.nn.SyncBatchNorm.convert_sync_batchnorm.
    """
    return _converted(module, process_set, {})


def _converted(module: nn.Module, process_set: ProcessSet | None, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in known:
        return known[module]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, (_InstanceNorm, SyncBatchNorm)):
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise UsageError(
                f"convert_sync_batchnorm: {type(module).__name__} does not know its number of features yet. Run the "
                "model once on a batch before it is converted."
            )
        shape = module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        result = SyncBatchNorm(*shape, process_set, device="meta").train(module.training)
        result._parameters, result._buffers = dict(module._parameters), dict(module._buffers)
    known[module] = result
    for name, child in list(module._modules.items()):
        if child is not None:
            result._modules[name] = _converted(child, process_set, known)
    return result

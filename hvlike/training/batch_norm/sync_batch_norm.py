"""SyncBatchNorm, and the conversion of a model's batch normalisation layers to it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as untraced
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvlike.collectives.controller.tensor_queue import AutomaticNames
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import current
from hvlike.collectives.session.process_set_state import ProcessSetState
from hvlike.errors import UsageError
from hvlike.training.batch_norm.statistics import Statistics, count_of, normalize, reduce_statistics


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
        process_set: The ranks to normalise over. Default: all.
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
        self.process_set = process_set

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

        Source: torch.nn.SyncBatchNorm.convert_sync_batchnorm.
        """

        return convert_sync_batchnorm(module, process_set)

    def extra_repr(self) -> str:
        """Return the options that repr() shows."""
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
        if count_of(values) <= 1 and int(statistics.total) == 1:
            raise UsageError(
                "Expected more than 1 value per channel when training, got 1 over all ranks; input size of this rank "
                f"is {list(values.shape)}."
            )
        self._track(statistics)
        return normalize(values, self.weight, self.bias, statistics, self.eps, name, self.process_set)

    @torch.no_grad()
    def _track(self, statistics: Statistics) -> None:
        """Move the running statistics towards those of this batch; an empty one moves nothing."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None:
            momentum = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, found in (
            (self.running_mean, statistics.mean),
            (self.running_var, statistics.unbiased_variance()),
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
        result = _synchronized(module, process_set)
    known[module] = result
    for name, child in list(module._modules.items()):
        if child is not None:
            result._modules[name] = _converted(child, process_set, known)
    return result


def _synchronized(old: _BatchNorm, process_set: ProcessSet | None) -> SyncBatchNorm:
    if isinstance(old, LazyModuleMixin) and old.has_uninitialized_params():
        raise UsageError(
            f"convert_sync_batchnorm: {type(old).__name__} does not know its number of features yet. Run the model "
            "once on a batch before it is converted."
        )
    new = SyncBatchNorm(
        old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_set, device="meta"
    )
    new._parameters = dict(old._parameters)
    new._buffers = dict(old._buffers)
    return new.train(old.training)

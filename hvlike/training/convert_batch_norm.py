"""Batch normalisation layers of a model, replaced by SyncBatchNorm."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvlike.collectives.process_set import ProcessSet
from hvlike.errors import UsageError
from hvlike.training.sync_batch_norm import SyncBatchNorm


def convert_sync_batchnorm(module: nn.Module, process_set: ProcessSet | None = None) -> nn.Module:
    """Replace every BatchNorm1d, 2d, 3d and torch.nn.SyncBatchNorm in a model by an hvlike.SyncBatchNorm.

    module: changed in place. process_set: the ranks the new layers normalise over, None for all.
    Parameters and buffers are the same objects as before, so an optimizer made earlier still has them; a layer that is
    used in several places stays one layer; training flags are kept. Other layers are left alone. Hooks of a replaced
    layer are not taken over. Local.
    Returns the model, or the new layer if `module` is a batch normalisation itself.
    Raises: UsageError for a lazy layer that does not know its number of features yet.
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

"""`Trainer(sync_batchnorm=True)`: batch normalisation over the batches of all ranks, while it trains."""

from __future__ import annotations

from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvlike.training.convert_batch_norm import convert_sync_batchnorm


class HvlikeSyncBatchNorm(LayerSync):
    """Puts hvlike.SyncBatchNorm in the places of batch normalisation layers, and these back.

    Source: lightning.pytorch.plugins.LayerSync.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace the layers; parameters and buffers stay the same objects. Local."""
        self._replaced = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, _BatchNorm)
        ]
        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the layers back, as they have become. Local."""
        for parent, name, layer in self._replaced:
            trained = parent._modules[name]
            if trained is not None:
                layer._parameters.update(trained._parameters)
                layer._buffers.update(trained._buffers)
                parent._modules[name] = layer.train(trained.training)
        self._replaced = []
        return model

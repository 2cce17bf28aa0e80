"""An accelerate.Accelerator that wraps models in hvlike.nn.DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hvlike.errors import UsageError
from hvlike.integrations.huggingface.start import check_ranks
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.training.optimizer import DistributedOptimizer


class HvlikeAccelerator(Accelerator):
    """accelerate's Accelerator; gradients are reduced by hvlike. Call `init()` of this package before it is made.

    Everything else (data loaders, gather_for_metrics, no_sync and accumulate, clip_grad_norm_, mixed precision, saving)
    is accelerate's own, which goes through torch.distributed over hvlike. A DistributedDataParallelKwargs among
    kwargs_handlers says how models are wrapped.
    Source: accelerate.Accelerator.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        check_ranks(self.num_processes)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put the model on its device, in autocast or compiled as configured, and wrap it to be trained.

        A communication hook of DistributedDataParallelKwargs is registered. Collective, unless evaluation_mode; blocks.
        """
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        trains = any(parameter.requires_grad for parameter in prepared.parameters())
        if evaluation_mode or not is_new or not self.use_distributed or not trains:
            return prepared
        wrapped = DistributedDataParallel(prepared, device_ids=self._device_ids(), **self._settings())
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]  # torch's stub knows tensors and modules only
        self._models[-1] = wrapped
        return wrapped

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As accelerate's. Raises: UsageError for an optimizer that reduces gradients once more."""
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError(
                "The optimizer is a hvlike.DistributedOptimizer, but the model's gradients are reduced already. Pass "
                "the plain optimizer."
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def unwrap_model(self, model: nn.Module, *arguments: Any, **settings: Any) -> Any:
        """Return the model inside of what it is wrapped in. Local."""
        inner = super().unwrap_model(model, *arguments, **settings)
        while isinstance(inner, DistributedDataParallel):
            inner = super().unwrap_model(inner.module, *arguments, **settings)
        return inner

    def _device_ids(self) -> list[torch.device] | None:
        return None if self.device.type == "cpu" else [self.device]

    def _settings(self) -> dict[str, Any]:
        """What the user has said of DistributedDataParallel."""
        if self.ddp_handler is None:
            return {}
        settings: dict[str, Any] = self.ddp_handler.to_kwargs()
        return settings

"""Hugging Face: call `init()`, then train with HvlikeTrainer in place of transformers.Trainer."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import nn

from hvlike.collectives.session import basics
from hvlike.errors import UsageError
from hvlike.integrations.torch_distributed import init_process_group
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.untraced import keep_untraced

try:
    from transformers import Trainer
except ModuleNotFoundError as missing:
    # accelerate works without it.
    if missing.name != "transformers":
        raise

    class Trainer:  # type: ignore[no-redef]
        """Stands for transformers.Trainer where transformers is not installed."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            raise ModuleNotFoundError(
                "HvlikeTrainer needs transformers: pip install transformers. HvlikeAccelerator works without it.",
                name="transformers",
            )


def init() -> None:
    """Start hvlike and torch.distributed over it, and tell accelerate of the ranks.

    Call it before TrainingArguments, Accelerator or PartialState are made. It sets RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE, which accelerate and transformers read, and where there is no GPU, ACCELERATE_USE_CPU. Accelerate
    then gathers metrics, distributes data and waits through hvlike, and `is_world_process_zero` is right on every rank.
    Collective: every rank calls it. Blocks until all have.

    Raises:
        UsageError: Where accelerate was started before; as torch_distributed.init_process_group.
    """
    init_process_group()
    places = {"RANK": basics.rank(), "WORLD_SIZE": basics.size()}
    places |= {"LOCAL_RANK": basics.local_rank(), "LOCAL_WORLD_SIZE": basics.local_size()}
    os.environ.update({name: str(value) for name, value in places.items()})
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if PartialState._shared_state:
        check_ranks(PartialState().num_processes)


def check_ranks(number: int) -> None:
    """Raise UsageError unless accelerate sees all ranks: each would train a model of its own."""
    if number != basics.size():
        raise UsageError(
            f"accelerate sees {number} of the {basics.size()} ranks: it was started before hvlike, and each rank "
            "would train by itself. Call hvlike.integrations.huggingface.init() before TrainingArguments, Accelerator "
            "or PartialState are made."
        )


class HvlikeAccelerator(Accelerator):
    """accelerate's Accelerator; gradients are reduced by hvlike. Call `init()` of this package before it is made.

    Everything else (data loaders, gather_for_metrics, no_sync and accumulate, `clip_grad_norm_`, mixed precision,
    saving) is accelerate's own, which goes through torch.distributed over hvlike. Collective: every rank makes one.

    Args:
        arguments: As for accelerate.Accelerator.
        settings: As for accelerate.Accelerator. A DistributedDataParallelKwargs among kwargs_handlers sets how models
            are wrapped.

    Raises:
        UsageError: Where accelerate does not see all ranks.

    Example:
        >>> huggingface.init()
        >>> accelerator = HvlikeAccelerator()
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Source: accelerate.Accelerator.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        check_ranks(self.num_processes)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put the model on its device, in autocast or compiled as configured, and wrap it for training.

        A communication hook of DistributedDataParallelKwargs is registered. Collective, unless evaluation_mode; blocks.

        Args:
            model: The model.
            device_placement: Whether to move the model to its device. Default: as the accelerator was made with.
            evaluation_mode: Leave the model unwrapped.

        Returns:
            The model, wrapped if it has parameters to train.
        """
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        trains = any(parameter.requires_grad for parameter in prepared.parameters())
        if evaluation_mode or not is_new or not self.use_distributed or not trains:
            return prepared
        settings = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        device_ids = None if self.device.type == "cpu" else [self.device]
        wrapped = DistributedDataParallel(prepared, device_ids=device_ids, **settings)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]  # torch's stub knows tensors and modules only
        self._models[-1] = wrapped
        return wrapped

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer as accelerate does. Local.

        Args:
            optimizer: A plain optimizer.
            device_placement: As for accelerate.Accelerator.prepare_optimizer.

        Returns:
            The optimizer, wrapped by accelerate.

        Raises:
            UsageError: For an optimizer that would reduce the gradients once more.
        """
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError(
                "The optimizer is an hvlike.DistributedOptimizer, but the model's gradients are reduced already. Pass "
                "the plain optimizer."
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def unwrap_model(self, model: nn.Module, *arguments: Any, **settings: Any) -> Any:
        """Return the model without its wrappers. Local.

        Args:
            model: A prepared model.
            arguments: As for accelerate.Accelerator.unwrap_model.
            settings: As for accelerate.Accelerator.unwrap_model.

        Returns:
            The module inside.
        """
        inner = super().unwrap_model(model, *arguments, **settings)
        while isinstance(inner, DistributedDataParallel):
            inner = super().unwrap_model(inner.module, *arguments, **settings)
        return inner


class DataParallelTrainer:
    """Makes a Trainer train over hvlike: `class MyTrainer(DataParallelTrainer, Seq2SeqTrainer)`.

    Call `init()` of this package before TrainingArguments are made. Every rank gets its share of the data, the loss in
    the log and the metrics of an evaluation are those of all ranks, rank 0 writes checkpoints, and every rank reads
    them. Collective: every rank makes it, and makes the same calls.

    Raises:
        UsageError: Where TrainingArguments see another number of ranks than hvlike has.
    """

    accelerator: HvlikeAccelerator

    def create_accelerator_and_postprocess(self) -> None:
        """Called by the Trainer, which makes its Accelerator itself."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the Trainer comes after this class
        check_ranks(self.accelerator.num_processes)
        self.accelerator.__class__ = HvlikeAccelerator


class HvlikeTrainer(DataParallelTrainer, Trainer):
    """transformers.Trainer over hvlike; see DataParallelTrainer.

    Source: transformers.Trainer.
    """


__all__ = ["DataParallelTrainer", "HvlikeAccelerator", "HvlikeTrainer", "init"]

keep_untraced(globals())

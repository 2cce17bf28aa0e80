"""What lightning.py and pytorch_lightning.py make strategies of: the two packages are twins that share no classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api import barrier_join
from hvlike.collectives.api.allreduce import allreduce_
from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.session import basics
from hvlike.errors import UsageError
from hvlike.training.broadcast import broadcast_parameters
from hvlike.training.ddp.comm_hooks import Hook
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.training.sync_batch_norm import convert_sync_batchnorm


class HvlikeSyncBatchNorm:
    """Replaces batch normalisation layers by hvlike.SyncBatchNorm, and puts them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace the layers. Parameters and buffers stay the same objects. Local."""
        self._replaced = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, _BatchNorm)
        ]
        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the layers back with the state that they have now. Local."""
        for parent, name, layer in self._replaced:
            trained = parent._modules[name]
            if trained is not None:
                layer._parameters.update(trained._parameters)
                layer._buffers.update(trained._buffers)
                parent._modules[name] = layer.train(trained.training)
        self._replaced = []
        return model


class HvlikeEnvironment:
    """The place of this rank, as mpirun has decided it. Needs hvlike to be initialised."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        """Raises UsageError: the ranks know each other by MPI."""
        raise UsageError("hvlike's ranks know each other by MPI: there is no main address, and no port.")

    main_port: Any = main_address

    detect = staticmethod(basics.is_initialized)
    world_size = staticmethod(basics.size)
    global_rank = staticmethod(basics.rank)
    local_rank = staticmethod(basics.local_rank)
    node_rank = staticmethod(basics.cross_rank)

    def set_world_size(self, size: int) -> None:
        """Ignored, as the next one: mpirun decides it."""

    set_global_rank = set_world_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Ignored, too: all that counts is what mpirun has started."""

    def teardown(self) -> None:
        """Leaves hvlike running: a program may make another Trainer."""


def gather_metrics(module: nn.Module) -> None:
    """Let metrics without a `dist_sync_fn` of their own gather from all ranks when they are computed. Local."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_tensors
            metric.distributed_available_fn = has_other_ranks


def has_other_ranks() -> bool:
    return basics.is_initialized() and basics.size() > 1


def gather_tensors(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order. Their shapes may differ, but not their numbers of dimensions.

    group: a ProcessSet, None for all ranks. Collective over it; blocks.
    """
    shapes = allgather(torch.tensor([tensor.shape], dtype=torch.int64, device="cpu"), process_set=group).tolist()
    elements = allgather(tensor.detach().reshape(-1), process_set=group)
    parts = torch.split(elements, [torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


Object = TypeVar("Object")

_OPS = {each.name.lower(): each for each in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)}
_OPS |= dict.fromkeys(("avg", "mean"), ReduceOp.AVERAGE)


_ParallelStrategy: Any = object  # Of either package; the class that is made of this one and of it has both


class DataParallelStrategy(_ParallelStrategy):
    """Trains a LightningModule in an hvlike.nn.DistributedDataParallel on every rank of the job."""

    reset_seed: Callable[[], None]
    """Of the package."""

    strategy_name = "hvlike"

    model: Any  # The module, wrapped while it is trained
    _layer_sync: Any

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        comm_hook: Hook | None = None,
        comm_state: Any = None,
        **data_parallel: Any,
    ) -> None:
        basics.init()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=HvlikeEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._comm_hook = comm_hook
        self._comm_state = comm_state
        self._data_parallel = data_parallel
        self._fits = False
        rank_zero_only.rank = self.global_rank

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Let `Trainer(strategy="hvlike")` mean this class."""
        strategy_registry.register(cls.strategy_name, cls, description="data-parallel over MPI, by hvlike")

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: the one of its local rank among those of the node."""
        devices = self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def is_distributed(self) -> bool:
        """True: the Trainer deals the data out to the ranks."""
        return True

    @property
    def num_nodes(self) -> int:
        """The number of nodes that mpirun has started ranks on."""
        return basics.cross_size()

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Ignored: the Trainer's default."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a DistributedSampler."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Prepare the device of this rank."""
        super().setup_environment()
        self.reset_seed()

    def setup(self, trainer: Any) -> None:
        """Prepare the model and make it equal on all ranks. Collective; blocks.

        Args:
            trainer: The Trainer.
        """
        self._fits = trainer.state.fn == "fit"
        if type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
            self._layer_sync = HvlikeSyncBatchNorm()
        if self._fits and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        gather_metrics(self.lightning_module)
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Called by Lightning when the model is on its device: wrap it for training, else only make it equal."""
        if not self._fits:
            broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
            return model
        devices = None if self.root_device.type == "cpu" else [self.root_device]
        wrapped = DistributedDataParallel(model, device_ids=devices, **self._data_parallel)
        if self._comm_hook is not None:
            wrapped.register_comm_hook(self._comm_state, self._comm_hook)
        return wrapped

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers that the module configures.

        Args:
            trainer: The Trainer.

        Raises:
            UsageError: For an optimizer that would reduce the gradients once more.
        """
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                raise UsageError(
                    "configure_optimizers() returned an hvlike.DistributedOptimizer, but HvlikeStrategy reduces the "
                    "gradients itself. Return the plain optimizer."
                )

    def model_to_device(self) -> None:
        """Move the module to the device of this rank."""
        self.model.to(self.root_device)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Let a backward pass of manual optimization, which runs inside of forward, reduce the gradients.

        Args:
            closure_loss: What the pass begins with.
        """
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self.model.reduce_through(closure_loss)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward passes only add up gradients on this rank."""
        with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext():
            yield

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective; blocks.

        Args:
            name: Not used.
        """
        barrier_join.barrier()

    def broadcast(self, obj: Object, src: int = 0) -> Object:
        """Return the object of one rank on all ranks. Collective; blocks.

        Args:
            obj: Any object that pickles; only that of `src` counts.
            src: The rank whose object is returned.

        Returns:
            The object of rank `src`.
        """
        received: Object = broadcast_object(obj, root_rank=src)
        return received

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, in place. Collective; blocks.

        Args:
            tensor: Of the same shape and dtype on every rank. Anything but a tensor is returned as it is.
            group: A ProcessSet, None for all ranks.
            reduce_op: "mean", "sum", "min", "max" or "product", or torch.distributed's constant. None: sum.

        Returns:
            The tensor.

        Raises:
            UsageError: For other reductions.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        name = "sum" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
        if name not in _OPS:
            raise UsageError(f"HvlikeStrategy.reduce: expected one of {sorted(_OPS)}, got {reduce_op!r}.")
        allreduce_(tensor.detach(), op=_OPS[name], process_set=group)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather the tensors of all ranks. Collective; blocks.

        Args:
            tensor: Of the same shape (...) on every rank.
            group: A ProcessSet, None for all ranks.
            sync_grads: Whether gradients flow back to the ranks that sent.

        Returns:
            A tensor of shape (ranks, ...).
        """
        with nullcontext() if sync_grads else torch.no_grad():
            return allgather(tensor.unsqueeze(0), process_set=group)

    def teardown(self) -> None:
        """Give the module back as it was."""
        self.model = self.lightning_module
        if self._fits and self._layer_sync is not None and self.model is not None:
            self._layer_sync.revert(self.model)
        super().teardown()


def inner_schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler of learning rates and those that it consists of, as SequentialLR."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from inner_schedulers(each)


class HorovodDataParallelStrategy(DataParallelStrategy):
    """Does what programs know of the HorovodStrategy that Lightning had until version 2."""

    strategy_name = "horovod"

    def __init__(self, *args: Any, **data_parallel: Any) -> None:
        # What Horovod does: parameters without a gradient are no error, and each rank has statistics of its own.
        super().__init__(*args, **{"find_unused_parameters": True, "broadcast_buffers": False} | data_parallel)

    @property
    def root_device(self) -> torch.device:
        """The GPU of this rank's place on its node, whatever `devices` of the Trainer says; or the CPU."""
        device = super().root_device
        count = torch.cuda.device_count() if device.type == "cuda" else 0
        return torch.device("cuda", self.local_rank % count) if count else device

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, with the learning rates times the number of ranks.

        Args:
            trainer: The Trainer.
        """
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= self.world_size
        for config in self.lr_scheduler_configs:
            for scheduler in inner_schedulers(config.scheduler):
                if hasattr(scheduler, "base_lrs"):
                    scheduler.base_lrs = [rate * self.world_size for rate in scheduler.base_lrs]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather the tensors of all ranks, one after the other, as Horovod's allgather. Collective; blocks.

        Args:
            tensor: Of shape (n, ...), where n may differ between ranks, or a scalar.
            group: A ProcessSet, None for all ranks.
            sync_grads: Whether gradients flow back to the ranks that sent.

        Returns:
            A tensor of shape (sum of n, ...); a scalar counts as one of shape (1).
        """
        with nullcontext() if sync_grads else torch.no_grad():
            return allgather(tensor if tensor.dim() else tensor.reshape(1), process_set=group)

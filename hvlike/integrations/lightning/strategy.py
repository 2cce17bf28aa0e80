"""A Lightning strategy: the Trainer trains data-parallel over the ranks that mpirun has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from hvlike.collectives import barrier, lifecycle
from hvlike.collectives.allgather import allgather
from hvlike.collectives.allreduce import allreduce_
from hvlike.collectives.objects import broadcast_object
from hvlike.errors import UsageError
from hvlike.integrations.lightning.batch_norm import HvlikeSyncBatchNorm
from hvlike.integrations.lightning.environment import HvlikeEnvironment
from hvlike.integrations.lightning.metrics import gather_metrics
from hvlike.planes.ops import ReduceOp
from hvlike.training.broadcast_state import broadcast_parameters
from hvlike.training.ddp.data_parallel import DistributedDataParallel
from hvlike.training.ddp.hooked_reducer import Hook
from hvlike.training.optimizer import DistributedOptimizer

Object = TypeVar("Object")

_OPS = {
    "avg": ReduceOp.AVERAGE,
    "mean": ReduceOp.AVERAGE,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


class HvlikeStrategy(ParallelStrategy):
    """Trains a LightningModule in a hvlike.nn.DistributedDataParallel on every rank of the job.

    `mpirun -n 4 python train.py` with `Trainer(strategy=HvlikeStrategy())` is all; the number of ranks is mpirun's.
    Gradient clipping and accumulation, automatic and manual optimization, `sync_dist=True`, metrics of torchmetrics in
    the module, `sync_batchnorm=True`, distributed samplers and checkpoints work as with Lightning's DDPStrategy.
    torch.distributed is not used.

    comm_hook, comm_state: how gradients are reduced, see DistributedDataParallel.register_comm_hook.
    data_parallel: further arguments of DistributedDataParallel, such as find_unused_parameters.
    Collective: every rank makes one, and the same Trainer around it. Starts hvlike if it does not run.
    Raises: as hvlike.init.
    Source: lightning.pytorch.strategies.DDPStrategy.
    """

    strategy_name = "hvlike"

    model: Any
    """The module, wrapped while it is trained."""
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
        lifecycle.init()
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
        """The device of this rank: of those that the Trainer found on the node, that of its local rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def is_distributed(self) -> bool:
        """True: the Trainer deals the data out to the ranks."""
        return True

    @property
    def num_nodes(self) -> int:
        """How many nodes mpirun has started ranks on."""
        return lifecycle.cross_size()

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Ignored: the Trainer's default."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a DistributedSampler is made with."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Prepare the device of this rank."""
        super().setup_environment()
        reset_seed()

    def setup(self, trainer: Any) -> None:
        """Prepare the model, and make it equal on all ranks. Collective; blocks."""
        self._fits = trainer.state.fn == TrainerFn.FITTING
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._layer_sync = HvlikeSyncBatchNorm()
        if self._fits and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        gather_metrics(self.lightning_module)
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """What Lightning calls when the model is on its device: wrapped to train; to look at, it is only made equal."""
        if not self._fits:
            broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
            return model
        devices = None if self.root_device.type == "cpu" else [self.root_device]
        wrapped = DistributedDataParallel(model, device_ids=devices, **self._data_parallel)
        if self._comm_hook is not None:
            wrapped.register_comm_hook(self._comm_state, self._comm_hook)
        return wrapped

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers that the module configures. Raises: UsageError for those that reduce once more."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                raise UsageError(
                    "configure_optimizers() has returned a hvlike.DistributedOptimizer, but HvlikeStrategy reduces the "
                    "gradients itself. Return the plain optimizer."
                )

    def model_to_device(self) -> None:
        """Move the module to the device of this rank."""
        self.model.to(self.root_device)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """In manual optimization a backward pass runs inside of forward: it reduces all the same."""
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self.model.reduce_through(closure_loss)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward passes only add up gradients on this rank."""
        with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext():
            yield

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective; blocks."""
        barrier.barrier()

    def broadcast(self, obj: Object, src: int = 0) -> Object:
        """Return the object of one rank on all. Collective; blocks."""
        received: Object = broadcast_object(obj, root_rank=src)
        return received

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, in place; anything else is returned as it is. Collective; blocks.

        group: ranks of a ProcessSet, None for all. reduce_op: its name, or torch.distributed's constant; None: sum.
        Raises: UsageError for other reductions.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        name = "sum" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
        if name not in _OPS:
            raise UsageError(f"HvlikeStrategy.reduce: expected one of {sorted(_OPS)}, got {reduce_op!r}.")
        allreduce_(tensor.detach(), op=_OPS[name], process_set=group)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return (ranks, ...): the tensors of all ranks, of one shape. Collective; blocks.

        group: ranks of a ProcessSet, None for all. sync_grads: gradients flow back to the ranks that sent.
        """
        with nullcontext() if sync_grads else torch.no_grad():
            return allgather(tensor.unsqueeze(0), process_set=group)

    def teardown(self) -> None:
        """Give the module back as it was."""
        self.model = self.lightning_module
        if self._fits and self._layer_sync is not None and self.model is not None:
            self._layer_sync.revert(self.model)
        super().teardown()


HvlikeStrategy.register_strategies(StrategyRegistry)

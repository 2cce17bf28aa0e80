"""Lightning: `Trainer(strategy=HvlikeStrategy())`, or `Trainer(strategy="hvlike")` once this module is imported."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

from hvlike.integrations.lightning_strategy import DataParallelStrategy, HorovodDataParallelStrategy, HvlikeEnvironment
from hvlike.untraced import keep_untraced


class HvlikeStrategy(DataParallelStrategy, ParallelStrategy):
    """Trains a LightningModule in an hvlike.nn.DistributedDataParallel on every rank of the job.

    `mpirun -n 4 python train.py` with `Trainer(strategy=HvlikeStrategy())` is all; the number of ranks is mpirun's.
    Gradient clipping and accumulation, automatic and manual optimization, `sync_dist=True`, metrics of torchmetrics in
    the module, `sync_batchnorm=True`, distributed samplers and checkpoints work as with Lightning's DDPStrategy.
    torch.distributed is not used. Collective: every rank makes one, and the same Trainer around it. Starts hvlike if it
    is not initialised.

    Args:
        accelerator: As for ParallelStrategy; the Trainer sets it.
        parallel_devices: The devices of the node; the Trainer sets them. A rank takes the one of its local rank.
        checkpoint_io: As for ParallelStrategy.
        precision_plugin: As for ParallelStrategy; the Trainer sets it.
        comm_hook: How gradients are reduced, see DistributedDataParallel.register_comm_hook.
        comm_state: The state that comm_hook gets.
        data_parallel: More arguments of DistributedDataParallel, such as find_unused_parameters.

    Raises:
        LaunchError: As hvlike.init.

    Example:
        >>> trainer = Trainer(strategy=HvlikeStrategy(find_unused_parameters=True), accelerator="cpu")
        >>> trainer.fit(module, loader)

    Source: lightning.pytorch.strategies.DDPStrategy.
    """

    reset_seed = staticmethod(reset_seed)


class HorovodStrategy(HorovodDataParallelStrategy, HvlikeStrategy):
    """For programs that were written for Lightning with Horovod: learning rates are multiplied by the number of ranks.

    `Trainer(strategy="horovod")` means it in programs that import horovod by `hvlike.horovod`. all_gather() joins the
    tensors of the ranks, as Horovod does, and each rank of a node uses the GPU of its local rank. Collective, as
    HvlikeStrategy.

    Args:
        args: As for HvlikeStrategy.
        data_parallel: The same; find_unused_parameters is True and broadcast_buffers False unless they are given.

    Source: pytorch_lightning.strategies.HorovodStrategy of Lightning 1.9.
    """


ClusterEnvironment.register(HvlikeEnvironment)
HvlikeStrategy.register_strategies(StrategyRegistry)


__all__ = ["HorovodStrategy", "HvlikeStrategy"]

keep_untraced(globals())

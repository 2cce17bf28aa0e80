"""What lightning.py has, for programs that import `pytorch_lightning`, and not `lightning.pytorch`."""

from __future__ import annotations

from lightning_fabric.plugins import ClusterEnvironment
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry

from hvlike.integrations.lightning_strategy import DataParallelStrategy, HorovodDataParallelStrategy, HvlikeEnvironment
from hvlike.untraced import keep_untraced


class HvlikeStrategy(DataParallelStrategy, ParallelStrategy):
    """HvlikeStrategy of hvlike.integrations.lightning, for the Trainer of pytorch_lightning."""

    reset_seed = staticmethod(reset_seed)


class HorovodStrategy(HorovodDataParallelStrategy, HvlikeStrategy):
    """HorovodStrategy of hvlike.integrations.lightning, for the Trainer of pytorch_lightning."""


ClusterEnvironment.register(HvlikeEnvironment)
HvlikeStrategy.register_strategies(StrategyRegistry)


__all__ = ["HorovodStrategy", "HvlikeStrategy"]

keep_untraced(globals())

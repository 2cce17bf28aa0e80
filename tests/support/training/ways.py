"""The ways to wrap a model for training: what tests that hold for every wrapper are parametrised by.

optimizer               DistributedOptimizer
adasum                  the same with op=Adasum
ddp                     DistributedDataParallel and a plain optimizer
built-in hook           the same with allreduce_hook
find unused             "ddp" with find_unused_parameters=True; static graph: with static_graph=True
hook                    "find unused" with a communication hook of the program
zero                    ZeroRedundancyOptimizer that reduces gradients itself
ddp, zero               "find unused" and a ZeroRedundancyOptimizer
zero in backward        the same, stepping in a communication hook
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from support.training.problem import loss_of, share, whole_batch
from torch import Tensor, nn

import hvlike
from hvlike.join import Joinable
from hvlike.nn import DistributedDataParallel, GradBucket, allreduce_hook
from hvlike.optim import ZeroRedundancyOptimizer, hook_with_zero_step

OF_MODULE = ("ddp", "built-in hook", "find unused", "static graph", "hook", "ddp, zero", "zero in backward")
OPTIONS: dict[str, dict[str, bool]] = {
    "find unused": {"find_unused_parameters": True},
    "hook": {"find_unused_parameters": True},
    "ddp, zero": {"find_unused_parameters": True},
    "zero in backward": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


def own_hook(state: object, bucket: GradBucket) -> Any:
    """Averages a bucket, as a hook of a program does."""
    return allreduce_hook(state, bucket)


class Wrapped:
    """A module to call and an optimizer to step."""

    def __init__(
        self,
        way: str,
        model: nn.Module,
        kind: type[torch.optim.Optimizer] = torch.optim.SGD,
        wrapper: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """wrapper: options of hvlike's class, of the optimizer where there are two; others are those of `kind`."""
        self.way, self.inner, self.module = way, model, model
        given = dict(wrapper or {})
        options = options or {"lr": 0.1}
        if way in OF_MODULE:
            of_module = {key: given[key] for key in given if "zero" not in way or key == "process_set"}
            self.module = DistributedDataParallel(model, **OPTIONS.get(way, {}), **of_module)
        if way.endswith("hook"):
            self.module.register_comm_hook(None, own_hook if way == "hook" else allreduce_hook)
        self.optimizer: Any
        if "zero" in way:
            given |= {"reduce_gradients": way == "zero", "overlap_with_ddp": way == "zero in backward"}
            self.optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **given, **options)
        else:
            self.optimizer = kind(model.parameters(), **options)
        if way == "zero in backward":
            self.module.register_comm_hook(
                None, hook_with_zero_step(allreduce_hook, self.module, self.optimizer, warm_up=0)
            )
        if way in ("optimizer", "adasum"):
            op = hvlike.Adasum if way == "adasum" else hvlike.Average
            self.optimizer = hvlike.DistributedOptimizer(
                self.optimizer, model.named_parameters(), **{"op": op, **given}
            )

    @property
    def joinables(self) -> list[Joinable]:
        """Those of both that a Join context takes."""
        return [each for each in (self.module, self.optimizer) if isinstance(each, Joinable)]

    def local(self) -> AbstractContextManager[None]:
        """Inside of it, passes are summed up on this rank. ZeRO alone reduces in step() only, and has no such thing."""
        owner: Any = self.module if self.way in OF_MODULE else self.optimizer
        return nullcontext() if self.way == "zero" else owner.no_sync()

    def clip(self, hvd: ModuleType, norm: float) -> None:
        """Clip by hvlike's function where gradients are not reduced when backward returns."""
        if self.way in ("optimizer", "zero"):
            hvd.clip_grad_norm_(self.optimizer, norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.inner.parameters(), norm)

    def step(self, hvd: ModuleType, number: int = 0, **zeroing: bool) -> None:
        """One step on this rank's share of a batch."""
        self.optimizer.zero_grad(**zeroing)
        loss_of(self.module, share(hvd, whole_batch(number))).backward()
        self.optimizer.step()

    def owns(self, parameter: Tensor) -> bool:
        """Whether the gradient of all ranks stays on this one: ZeRO alone keeps those of its share."""
        if self.way != "zero":
            return True
        return any(parameter is each for group in self.optimizer.optim.param_groups for each in group["params"])

"""A rank of torch's own wrappers, over hvlike's backend or over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.fuzz.training import Training, make_optimizer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GLOO_SECONDS = 10.0


def groups() -> list[dist.ProcessGroup]:
    """Return a group of hvlike and one of gloo, of all ranks; made at the first need."""
    if not dist.is_initialized():
        dist.init_process_group("hvlike")
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=GLOO_SECONDS))
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, gloo]


class TorchWorld:
    """This process in one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def wrap(self, training: Training) -> None:
        """By DistributedDataParallel or fully_shard."""
        network = training.network
        if training.program.kind == "fsdp2":
            mesh = DeviceMesh.from_group(self.group, "cpu")
            for part in network.parts:
                if any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh)
            fully_shard(network, mesh=mesh)
        else:
            options = dict(training.program.options)
            training.model = DistributedDataParallel(network, process_group=self.group, **options)
        training.optimizer = make_optimizer(training.program.optimizer, network.parameters())

    def rewrap(self, training: Training) -> None:
        """Not drawn for torch's wrappers."""
        raise NotImplementedError

    uneven = resume = rewrap

    def backward(self, training: Training, loss: Tensor, *, reduces: bool, **options: bool) -> None:
        """Run a backward pass."""
        loss.backward(**options)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of the program."""
        return torch.compile(function, backend="eager")

    def no_sync(self, training: Training) -> AbstractContextManager[None]:
        """Return the context of local passes."""
        if training.program.kind == "fsdp2":
            return self._unsharded(training)
        assert isinstance(training.model, DistributedDataParallel)
        return training.model.no_sync()

    @contextmanager
    def _unsharded(self, training: Training) -> Iterator[None]:
        network: Any = training.network
        network.set_requires_gradient_sync(False)
        yield
        network.set_requires_gradient_sync(True)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average by hand."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group)
            tensor /= self.size

    def clip(self, training: Training, norm: float) -> None:
        """Clip by torch's function."""
        torch.nn.utils.clip_grad_norm_(training.network.parameters(), norm)

    def about_to_step(self, training: Training) -> None:
        """Only the oracle looks."""

    def for_scaler(self, training: Training) -> Any:
        """Return what a GradScaler is given."""
        return training.optimizer

    for_scheduler = for_scaler

    def state(self, training: Training) -> dict[int, dict[str, Any]]:
        """Return the state as it is on this rank, that of shards as a whole."""
        found: dict[int, dict[str, Any]] = training.optimizer.state_dict()["state"]
        return found

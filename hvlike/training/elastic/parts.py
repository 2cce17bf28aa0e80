"""Parts of a TorchState that are more than a value: how each is saved, restored and made the same on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvlike.collectives.objects import allgather_object, broadcast_object
from hvlike.training.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from hvlike.training.elastic.sampler import ElasticSampler
from hvlike.training.optimizer import DistributedOptimizer


class Part(ABC):
    """One object of a state that keeps its identity: only what is in it changes."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Keep a copy. Local."""
        self._saved = deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load what was saved. Local."""
        # Optimizers take the tensors they are given for their own.
        self.value.load_state_dict(deepcopy(self._saved))

    @abstractmethod
    def sync(self) -> None:
        """Take over the state of rank 0. Collective; blocks."""


class ModulePart(Part):
    """A model: parameters and buffers."""

    def sync(self) -> None:
        """Broadcast the tensors in place; what else is in the state dict goes as objects."""
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in state.items() if name not in tensors}
        broadcast_parameters(tensors, root_rank=0)
        others = broadcast_object(others, root_rank=0, name=f"elastic.{self.name}")
        if others:
            self.value.load_state_dict({**tensors, **others})


class OptimizerPart(Part):
    """A torch optimizer, wrapped or not; gradients are not part of the state."""

    def restore(self) -> None:
        """Load what was saved; a step that the error has interrupted is forgotten."""
        if isinstance(self.value, DistributedOptimizer):
            self.value.abandon()
        super().restore()

    def sync(self) -> None:
        """Broadcast state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerPart(Part):
    """An ElasticSampler: what the ranks together have processed."""

    def sync(self) -> None:
        """Merge what the ranks have processed in the epoch of rank 0."""
        states = allgather_object(self.value.state_dict(), name=f"elastic.{self.name}")
        epoch = states[0]["epoch"]
        processed = {index for each in states if each["epoch"] == epoch for index in each["processed_indices"]}
        self.value.load_state_dict({"epoch": epoch, "processed_indices": processed})


class StatefulPart(Part):
    """Anything with state_dict and load_state_dict: a learning rate scheduler, a GradScaler."""

    def sync(self) -> None:
        """Load the state dict of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0, name=f"elastic.{self.name}"))


def part_for(name: str, value: Any) -> Part | None:
    """What handles this value; None for a plain object."""
    if isinstance(value, nn.Module):
        return ModulePart(name, value)
    # Asked by its own name first: a DistributedOptimizer says that it is of the class it wraps.
    if isinstance(value, (DistributedOptimizer, Optimizer)):
        return OptimizerPart(name, value)
    if isinstance(value, ElasticSampler):
        return SamplerPart(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StatefulPart(name, value)
    return None

"""TorchState: a model, an optimizer, samplers and plain values as one state."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from hvlike.errors import UsageError
from hvlike.training.elastic.parts import Part, part_for
from hvlike.training.elastic.sampler import ElasticSampler
from hvlike.training.elastic.state import ObjectState, check_names


class TorchState(ObjectState):
    """The state of a training run with torch: `TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)`.

    model: a torch.nn.Module. optimizer: any torch optimizer, a DistributedOptimizer too.
    objects: anything else by name. Modules, optimizers, ElasticSamplers and objects with state_dict and
    load_state_dict (learning rate schedulers, GradScalers) stay the same objects, and their contents are saved,
    restored and synchronised; all others are values, which are copied and pickled.
    All are attributes of the state. Setting one of the former replaces and saves it.
    save() and restore() copy in memory and are local. sync() gives every rank what rank 0 has; of samplers it merges
    what the ranks have processed. Collective then: all ranks, with the same names; blocks.
    Raises: ShapeMismatchError, MismatchError on every rank where models or optimizers differ between ranks.
    Source: horovod.torch.elastic.TorchState.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **objects: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        objects = {**{name: value for name, value in given.items() if value is not None}, **objects}
        check_names(type(self), objects)
        parts = {name: part_for(name, value) for name, value in objects.items()}
        self._parts: dict[str, Part] = {name: part for name, part in parts.items() if part is not None}
        super().__init__(**{name: value for name, value in objects.items() if name not in self._parts})

    def save(self) -> None:
        """Keep copies of everything in memory. Local."""
        for part in self._parts.values():
            part.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last. Local."""
        for part in self._parts.values():
            part.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it. Collective: all ranks; blocks."""
        for part in self._parts.values():
            part.sync()
            part.save()
        super().sync()

    def reset(self) -> None:
        """Divide what the samplers have left among the ranks of now. Local."""
        for part in self._parts.values():
            if isinstance(part.value, ElasticSampler):
                part.value.reset()

    def __getattr__(self, name: str) -> Any:
        part = self.__dict__.get("_parts", {}).get(name)
        if part is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return part.value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__.get("_parts", {}):
            super().__setattr__(name, value)
            return
        part = part_for(name, value)
        if part is None:
            raise UsageError(
                f"{type(self).__name__}.{name} was a {type(self._parts[name].value).__name__} and cannot become a "
                f"plain {type(value).__name__}. Use another name for the value."
            )
        self._parts[name] = part

"""State, ObjectState and TorchState: what a training run returns to after an error, and what all ranks start from.

A StateHandler saves, restores and synchronises one object that is more than a value: a model, an optimizer, a sampler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.errors import UsageError
from hvlike.training.elastic.sampler import ElasticSampler
from hvlike.training.optimizer.distributed import DistributedOptimizer
from hvlike.training.state.broadcast import broadcast_optimizer_state, broadcast_parameters


class State:
    """The state of a training run that `elastic.run` brings back.

    Subclasses say what save, restore and sync do. Source: horovod.common.elastic.State.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self.commits = 0
        """How often commit() was called on this rank."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have these functions called, in this order, after each restart of hvlike and before the next sync(). Local.

        For what depends on the ranks of the job, a learning rate say.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """hvlike was started anew: calls reset() and then the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state as the one to return to, then check_host_updates().

        All ranks commit or none: a rank that fails before it gets here takes the others back to the commit before.
        Copies everything: call it after every so many batches, not after each one.
        Collective: all ranks, at the same place; blocks. Raises: HorovodInternalError where a rank has failed.
        """
        barrier()
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt where hosts have come or gone. Local: the ranks of an MPI job stay the same."""

    def reset(self) -> None:
        """Forget what depends on the ranks of the job; called after each restart. Nothing unless overridden."""

    def save(self) -> None:
        """Keep a copy of the state in memory. Local."""
        raise NotImplementedError(f"{type(self).__name__} does not define save().")

    def restore(self) -> None:
        """Go back to the copy that save() has kept. Local."""
        raise NotImplementedError(f"{type(self).__name__} does not define restore().")

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it. Collective: all ranks; blocks."""
        raise NotImplementedError(f"{type(self).__name__} does not define sync().")


class ObjectState(State):
    """Plain objects as attributes: `ObjectState(epoch=0, batch=0)`.

    objects: anything that pickles and can be deep-copied; set and read as attributes of the state.
    Raises: UsageError for a name that a method of the state has.
    Source: horovod.common.elastic.ObjectState.
    """

    def __init__(self, **objects: Any) -> None:
        super().__init__()
        check_names(type(self), objects)
        self._saved: dict[str, Any] = objects
        for name, value in objects.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def save(self) -> None:
        """Keep copies of the objects. Local."""
        self._saved = deepcopy({name: getattr(self, name) for name in self._saved})

    def restore(self) -> None:
        """Set the attributes to copies of what was saved. Local."""
        for name, value in deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them. Collective: all ranks; blocks.

        Raises: as broadcast_object.
        """
        if self._saved:
            mine = {name: getattr(self, name) for name in self._saved}
            for name, value in broadcast_object(mine, root_rank=0, name="elastic.objects").items():
                setattr(self, name, value)
        ObjectState.save(self)


def check_names(state: type, names: Iterable[str]) -> None:
    """Refuse names that would hide what a state itself has. Raises: UsageError."""
    for name in names:
        if hasattr(state, name) or name == "commits" or name.startswith("_"):
            raise UsageError(f"{state.__name__}: {name!r} cannot be the name of a value; the state uses it itself.")


class StateHandler(ABC):
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


class ModelStateHandler(StateHandler):
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


class OptimizerStateHandler(StateHandler):
    """A torch optimizer, wrapped or not; gradients are not part of the state."""

    def restore(self) -> None:
        """Load what was saved; a step that the error has interrupted is forgotten."""
        if isinstance(self.value, DistributedOptimizer):
            self.value.abandon()
        super().restore()

    def sync(self) -> None:
        """Broadcast state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """An ElasticSampler: what the ranks together have processed."""

    def sync(self) -> None:
        """Merge what the ranks have processed in the epoch of rank 0."""
        states = allgather_object(self.value.state_dict(), name=f"elastic.{self.name}")
        epoch = states[0]["epoch"]
        processed = {index for each in states if each["epoch"] == epoch for index in each["processed_indices"]}
        self.value.load_state_dict({"epoch": epoch, "processed_indices": processed})


class StatefulHandler(StateHandler):
    """Anything with state_dict and load_state_dict: a learning rate scheduler, a GradScaler."""

    def sync(self) -> None:
        """Load the state dict of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0, name=f"elastic.{self.name}"))


def handler_for(name: str, value: Any) -> StateHandler | None:
    """What handles this value; None for a plain object."""
    if isinstance(value, nn.Module):
        return ModelStateHandler(name, value)
    # Asked by its own name first: a DistributedOptimizer says that it is of the class it wraps.
    if isinstance(value, (DistributedOptimizer, Optimizer)):
        return OptimizerStateHandler(name, value)
    if isinstance(value, ElasticSampler):
        return SamplerStateHandler(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StatefulHandler(name, value)
    return None


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
        parts = {name: handler_for(name, value) for name, value in objects.items()}
        self._parts: dict[str, StateHandler] = {name: part for name, part in parts.items() if part is not None}
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
        part = handler_for(name, value)
        if part is None:
            raise UsageError(
                f"{type(self).__name__}.{name} was a {type(self._parts[name].value).__name__} and cannot become a "
                f"plain {type(value).__name__}. Use another name for the value."
            )
        self._parts[name] = part

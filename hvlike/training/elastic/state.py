"""State, ObjectState and TorchState: what a training run returns to after an error, and what all ranks start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.errors import UsageError
from hvlike.training.checkpoint import is_stateful
from hvlike.training.elastic.sampler import ElasticSampler
from hvlike.training.optimizer.distributed import DistributedOptimizer
from hvlike.training.state.broadcast import broadcast_optimizer_state, broadcast_parameters


class State:
    """The state of a training run that `elastic.run` brings back. Subclasses define save, restore and sync.

    Source: horovod.common.elastic.State.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self.commits = 0
        """How often commit() was called on this rank."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called, in this order, after each restart of hvlike and before the next sync(). Local.

        For what depends on the ranks of the job, a learning rate, say.

        Args:
            callbacks: The functions, without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call reset() and then the reset callbacks: hvlike was started anew. elastic.run calls it. Local."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state as the one to return to, then check_host_updates().

        All ranks commit or none: a rank that fails before takes the others back to the previous commit. It copies
        everything: call it after every so many batches, not after each one.
        Collective: all ranks, at the same place; blocks.

        Raises:
            HorovodInternalError: A rank has failed.
        """
        barrier()
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt where hosts have come or gone. Local: the ranks of an MPI job stay the same."""

    def reset(self) -> None:
        """Forget what depends on the ranks of the job; called after each restart. Does nothing unless overridden."""

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

    Args:
        objects: Anything that pickles and can be deep-copied, by name. Set and read as attributes of the state.

    Raises:
        UsageError: A name is that of a method of the state.

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
        """Set the attributes to those of rank 0, and save them. Collective: all ranks; blocks."""
        if self._saved:
            mine = {name: getattr(self, name) for name in self._saved}
            for name, value in broadcast_object(mine, root_rank=0, name="elastic.objects").items():
                setattr(self, name, value)
        ObjectState.save(self)


def check_names(state: type, names: Iterable[str]) -> None:
    for name in names:
        if hasattr(state, name) or name == "commits" or name.startswith("_"):
            raise UsageError(f"{state.__name__}: {name!r} cannot be the name of a value; the state uses it itself.")


class StatePart:
    """Saves, restores and synchronises one object that is more than a value, by its state dict."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        self._saved = deepcopy(self.value.state_dict())

    def restore(self) -> None:
        if isinstance(self.value, DistributedOptimizer):
            # Forgets a step that the error has interrupted.
            self.value.abandon()
        # Optimizers keep the tensors they are given.
        self.value.load_state_dict(deepcopy(self._saved))

    def sync(self) -> None:
        value, name = self.value, f"elastic.{self.name}"
        # A DistributedOptimizer may say that it is only of the class it wraps.
        if isinstance(value, (DistributedOptimizer, Optimizer)):
            broadcast_optimizer_state(value, root_rank=0)
        elif isinstance(value, ElasticSampler):
            # What the ranks together have processed in the epoch of rank 0.
            states = allgather_object(value.state_dict(), name=name)
            epoch = states[0]["epoch"]
            processed = {index for each in states if each["epoch"] == epoch for index in each["processed_indices"]}
            value.load_state_dict({"epoch": epoch, "processed_indices": processed})
        elif isinstance(value, nn.Module):
            # Tensors in place, other entries of the state dict as objects.
            state = value.state_dict()
            tensors = {key: each for key, each in state.items() if isinstance(each, Tensor)}
            broadcast_parameters(tensors, root_rank=0)
            others = {key: each for key, each in state.items() if key not in tensors}
            others = broadcast_object(others, root_rank=0, name=name)
            if others:
                value.load_state_dict({**tensors, **others})
        else:
            value.load_state_dict(broadcast_object(value.state_dict(), root_rank=0, name=name))


class TorchState(ObjectState):
    """The state of a training run with torch; all its parts are attributes.

    Modules, optimizers, ElasticSamplers and objects with state_dict and load_state_dict (learning rate schedulers,
    GradScalers) stay the same objects, and their contents are saved, restored and synchronised. Setting such an
    attribute replaces and saves the object. All others are values, which are copied and pickled.
    save() and restore() copy in memory and are local. sync() gives every rank what rank 0 has, and merges what the
    ranks have processed of samplers. It is collective: all ranks, with the same names; blocks.

    Args:
        model: A torch.nn.Module.
        optimizer: Any torch optimizer, a DistributedOptimizer too.
        objects: Anything else by name.

    Raises:
        UsageError: A name is that of a method of the state.
        ShapeMismatchError: From sync(), on every rank: models differ between ranks.
        MismatchError: From sync(), on every rank: optimizers differ between ranks.

    Example:
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    Source: horovod.torch.elastic.TorchState.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **objects: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        objects = {**{name: value for name, value in given.items() if value is not None}, **objects}
        check_names(type(self), objects)
        self._parts = {name: StatePart(name, value) for name, value in objects.items() if is_stateful(value)}
        super().__init__(**{name: value for name, value in objects.items() if name not in self._parts})

    def save(self) -> None:
        for part in self._parts.values():
            part.save()
        super().save()

    def restore(self) -> None:
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
        if not is_stateful(value):
            raise UsageError(
                f"{type(self).__name__}.{name} was a {type(self._parts[name].value).__name__} and cannot become a "
                f"plain {type(value).__name__}. Use another name for the value."
            )
        self._parts[name] = StatePart(name, value)

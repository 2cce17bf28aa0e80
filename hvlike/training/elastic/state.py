"""What a training run returns to after an error, and what all ranks start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from hvlike.collectives.barrier import barrier
from hvlike.collectives.objects import broadcast_object
from hvlike.errors import UsageError


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

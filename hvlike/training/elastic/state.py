"""State, ObjectState, TorchState: what a run returns to after an error, and what all ranks start from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.collectives.api.outcome import settle
from hvlike.collectives.requests.reduction import Max
from hvlike.collectives.session.basics import rank, size
from hvlike.errors import CheckpointError, UsageError
from hvlike.training.broadcast import broadcast_optimizer_state, broadcast_parameters
from hvlike.training.distributed_optimizer import DistributedOptimizer
from hvlike.training.elastic.checkpoint import is_stateful
from hvlike.training.elastic.commit_check import CommitCheck
from hvlike.training.elastic.copies import copy_into
from hvlike.training.elastic.local_parts import ElasticSampler, ModuleBuffers
from hvlike.training.elastic.local_state import (
    Found,
    LocalState,
    LocalStates,
    has_common_state,
    may_be_lost,
)
from hvlike.training.gradients.checksums import is_plain

if TYPE_CHECKING:
    from hvlike.training.elastic.durable import DurableCommits


class State:
    """The state of a training run that `elastic.run` brings back. Subclasses define save, restore and sync.

    Source: horovod.common.elastic.State.
    """

    durable: DurableCommits | None = None
    """Writes commits to the checkpoint folder, if there is one; set by elastic.run."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self.commits = 0
        """The number of the last commit: how many there were, without those that an error has taken back."""

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
        Inside elastic.run with HVLIKE_CHECKPOINT_DIR it is written there, too, every HVLIKE_CHECKPOINT_SECONDS.
        Collective: all ranks, at the same place; blocks.

        Raises:
            HorovodInternalError: A rank has failed.
            SystemExit: With status 75, after writing: the job was asked to end (`elastic.EXIT_PREEMPTED`).
        """
        if self.durable is None:
            barrier()
        else:
            self.durable.agree()
        self.commits += 1
        settle(f"commit {self.commits}", self.save, as_it_is=True)
        if self.durable is not None:
            self.durable.after_commit()
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

    def held_commits(self) -> list[int]:
        """Return the numbers of the commits that restore_commit can go back to. Local."""
        return []

    def restore_commit(self, number: int | None) -> None:
        """Go back to a commit, for elastic.run. Local. Unless overridden it is the last one, whatever its number.

        Args:
            number: One of held_commits() of all ranks; None if they have none in common.
        """
        self.restore()


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
        self._names = list(objects)
        self._commits: dict[int, Any] = {}
        for name, value in objects.items():
            setattr(self, name, value)
        self.save()

    def contents(self) -> dict[str, Any]:
        """Return the values and parts of now, by name. Local."""
        return {name: getattr(self, name) for name in self._names}

    def save(self) -> None:
        # Ranks may be one commit apart when one of them is lost: the last two are kept.
        given_up = [kept for number, kept in self._commits.items() if number != self.commits - 1]
        self._commits = {number: kept for number, kept in self._commits.items() if number == self.commits - 1}
        self._commits[self.commits] = self._copy(next(iter(given_up), None))

    def restore(self) -> None:
        self._set(self._commits[max(self._commits)])

    def held_commits(self) -> list[int]:
        return sorted(self._commits)

    def restore_commit(self, number: int | None) -> None:
        if number is not None:
            self.commits = number
            self._commits = {each: kept for each, kept in self._commits.items() if each <= number}
        self.restore()

    def sync(self) -> None:
        self.commits, told = broadcast_object(
            (self.commits, ObjectState.contents(self)), root_rank=0, name="elastic.objects"
        )
        for name, value in told.items():
            setattr(self, name, value)
        self.save()

    def _copy(self, given_up: Any) -> Any:
        """A copy of everything, for _set, in the memory of one that is given up."""
        return copy_into(given_up, ObjectState.contents(self))

    def _set(self, kept: Any) -> None:
        for name, value in deepcopy(kept).items():
            setattr(self, name, value)


def check_names(state: type, names: Iterable[str]) -> None:
    for name in names:
        if hasattr(state, name) or name == "commits" or name.startswith("_"):
            raise UsageError(f"{state.__name__}: {name!r} cannot be the name of a value; the state uses it itself.")


def _sync_part(name: str, value: Any) -> None:
    # A DistributedOptimizer may say that it is only of the class it wraps.
    if isinstance(value, (DistributedOptimizer, Optimizer)):
        broadcast_optimizer_state(value, root_rank=0)
    elif isinstance(value, ElasticSampler):
        # What the ranks together have processed in the epoch of rank 0.
        states = allgather_object(settle(name, value.state_dict, as_it_is=True), name=name)
        epoch = states[0]["epoch"]
        processed = {index for each in states if each["epoch"] == epoch for index in each["processed_indices"]}
        value.load_state_dict({"epoch": epoch, "processed_indices": processed})
    elif isinstance(value, nn.Module):
        # Tensors in place, other entries of the state dict as objects, sparse ones too.
        state = settle(name, value.state_dict, as_it_is=True)
        tensors = {key: each for key, each in state.items() if isinstance(each, Tensor) and is_plain(each)}
        broadcast_parameters(tensors, root_rank=0)
        others = {key: each for key, each in state.items() if key not in tensors}
        others = broadcast_object(others, root_rank=0, name=name)
        if others:
            settle(name, lambda: value.load_state_dict({**tensors, **others}), as_it_is=True)
    else:
        told = broadcast_object(settle(name, value.state_dict, as_it_is=True), root_rank=0, name=name)
        settle(name, lambda: value.load_state_dict(told), as_it_is=True)


logger = logging.getLogger("hvlike")

_LOST = "elastic: commit %d: the %s of ranks %s of %d are lost with their copies; all ranks have those of rank 0 now"


def _buffers_of(name: str) -> str:
    # No attribute can have this name.
    return f"{name}.buffers"


def _copies(parts: Mapping[str, Any], given_up: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: copy_into(given_up.get(name), value.state_dict())
        for name, value in parts.items()
        if has_common_state(value)
    }


class TorchState(ObjectState):
    """The state of a training run with torch; all its parts are attributes.

    Modules, optimizers, ElasticSamplers and objects with state_dict and load_state_dict (learning rate schedulers,
    GradScalers) stay the same objects, and their contents are saved, restored and synchronised. Setting such an
    attribute replaces and saves the object. All others are values, which are copied and pickled.
    State that differs between ranks (the shards of a ZeroRedundancyOptimizer, the state with op=Adasum, buffers
    of modules such as the running statistics of BatchNorm, and what an object's local_state_dict() returns, see
    LocalState) is copied to the next rank at each commit, and so survives the loss of a rank. The first two commits
    after sync() compare the parameters of modules between ranks. restore() is local, and save() where there is no such
    part. sync() gives every rank what rank 0 has, and merges what the ranks have processed of samplers. It is
    collective: all ranks, with the same names; blocks.

    Args:
        model: A torch.nn.Module.
        optimizer: Any torch optimizer, a DistributedOptimizer too.
        objects: Anything else by name.

    Raises:
        UsageError: A name is that of a method of the state.
        ShapeMismatchError: From sync(), on every rank: models differ between ranks.
        MismatchError: From sync(), on every rank: optimizers differ between ranks. From commit(), on every rank:
            parameters that were the same on all ranks differ; elastic.run goes back to the commit before.

    Example:
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    Source: horovod.torch.elastic.TorchState.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **objects: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        objects = {**{name: value for name, value in given.items() if value is not None}, **objects}
        check_names(type(self), objects)
        self._parts = {name: value for name, value in objects.items() if is_stateful(value)}
        self._parts |= {
            _buffers_of(name): ModuleBuffers(value)
            for name, value in self._parts.items()
            if isinstance(value, nn.Module)
        }
        self._local = {name: LocalStates(name) for name, value in self._parts.items() if isinstance(value, LocalState)}
        self._commit_check = CommitCheck()
        self._goes_back = self._restarted = self._synced = False
        self._incomplete = False  # Whether a part has lost what only one rank had, until a checkpoint is loaded
        super().__init__(**{name: value for name, value in objects.items() if name not in self._parts})

    def commit(self) -> None:
        for name, value in self._parts.items():
            if isinstance(value, ElasticSampler):
                value.merge(f"elastic.{name}.recorded")
        modules = {name: value for name, value in self._parts.items() if isinstance(value, nn.Module)}
        self._commit_check.compare(self.commits + 1, modules)
        super().commit()

    def save(self) -> None:
        # First what needs the other ranks: a commit that this rank has is whole.
        for name, states in self._local.items() if self._synced or self.commits else ():
            states.forget(self.commits - 1)
            states.save(self.commits, self._parts[name].local_state_dict)
        super().save()
        self._goes_back = False

    def restore(self) -> None:
        self._goes_back = True
        super().restore()

    def sync(self) -> None:
        kept = self._agree_on_local_states()
        for name, value in self._parts.items():
            if has_common_state(value):
                _sync_part(f"elastic.{name}", value)
        kept()
        self._restarted, self._synced = False, True
        super().sync()
        self._incomplete = False
        self._commit_check.start()

    def _agree_on_local_states(self) -> Callable[[], object]:
        """Agree on what each rank has another one of: that of the commit that all go back to, else as it is now.

        Returns what loads it, after the rest. Collective; blocks.
        """
        if not self._local:
            return lambda: None
        commit = self.commits if self._goes_back else -1
        told = torch.tensor([commit, int(self._restarted), int(self._incomplete)], device="cpu")
        number, restarted, incomplete = allreduce(told, name="elastic.local", op=Max).tolist()
        if number >= 0:
            return lambda: self._give_back(number, bool(incomplete))
        own: dict[str, Any] = {}
        if restarted:
            own = settle(
                "sync",
                lambda: {name: deepcopy(self._parts[name].local_state_dict()) for name in self._local},
                as_it_is=True,
            )
        return lambda: [self._parts[name].load_local_state_dicts({rank(): each}, size()) for name, each in own.items()]

    def _give_back(self, number: int, incomplete: bool) -> None:
        """Load what each rank has had of its own at a commit. Collective; blocks."""
        found = {name: states.find(number, holds=self._goes_back) for name, states in self._local.items()}
        lost = {name: each for name, each in found.items() if each.lost and not may_be_lost(self._parts[name])}
        self._incomplete = bool(lost) or incomplete
        for name, states in self._local.items():
            if found[name].lost and not self._incomplete and rank() == 0:
                logger.warning(_LOST, number, name, found[name].lost, found[name].ranks)
            give = states.give_up if self._incomplete or found[name].lost else states.give_back
            settle(f"elastic.{name}", partial(give, found[name], self._parts[name]), as_it_is=True)
        if self._incomplete:
            self._go_back_to_disk(number, lost)

    def _go_back_to_disk(self, number: int, lost: Mapping[str, Found]) -> None:
        """Load the newest checkpoint in place of a commit of which something is lost. Collective; blocks.

        Raises: CheckpointError on every rank where there is none.
        """
        whose = [f"what only ranks {each.lost} of {each.ranks} had of {name} is lost" for name, each in lost.items()]
        what = f"commit {number}: {'; '.join(whose) or 'loading a checkpoint in its place was interrupted'}"
        if self.durable is not None and self.durable.read(f"{what}. elastic.run goes back to the disk, and starts"):
            return
        missing = "HVLIKE_CHECKPOINT_DIR is not set" if self.durable is None else "no commit is on the disk yet"
        raise CheckpointError(
            f"{what}: they ended together with those that keep their copies (the rank after each), and {missing}. "
            "With HVLIKE_CHECKPOINT_DIR=DIR training goes back to the last commit that was written there, one every "
            "HVLIKE_CHECKPOINT_SECONDS."
        )

    def _copy(self, given_up: Any) -> Any:
        values, states = given_up or ({}, {})
        return super()._copy(values), _copies(self._parts, states)

    def contents(self) -> dict[str, Any]:
        return {**self._parts, **super().contents()}

    def _set(self, kept: Any) -> None:
        values, states = kept
        for name, part in self._parts.items():
            if isinstance(part, DistributedOptimizer):
                # Forgets a step that the error has interrupted.
                part.abandon()
            if name in states:
                # Optimizers keep the tensors they are given.
                part.load_state_dict(deepcopy(states[name]))
        super()._set(values)

    def reset(self) -> None:
        """Divide what the samplers have left among the ranks of now. Local."""
        self._restarted = True
        for value in self._parts.values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("_parts", {})
        if name not in parts:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return parts[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__.get("_parts", {}):
            super().__setattr__(name, value)
            return
        if not is_stateful(value):
            raise UsageError(
                f"{type(self).__name__}.{name} was a {type(self._parts[name]).__name__} and cannot become a "
                f"plain {type(value).__name__}. Use another name for the value."
            )
        self._parts[name] = value
        buffers = _buffers_of(name)
        self._parts.pop(buffers, None), self._local.pop(buffers, None)
        if isinstance(value, nn.Module):
            self._parts[buffers], self._local[buffers] = ModuleBuffers(value), LocalStates(buffers)
        for _, states in self._commits.values():
            states |= _copies({name: value}, {})

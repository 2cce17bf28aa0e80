"""The state of a ZeroRedundancyOptimizer: brought together, saved as a whole or by shards, loaded.

One rank asks the others for their share, one after the other; they answer in their loops, whatever their programs do:

    asks     ("ask", key, number, version)             version None: the state of now, in consolidate_state_dict
    answers  ("answer", number, status, structure)     with the tensors, if its state is of that version

A state is of the same version on all ranks while one of them is between two steps: no other can make a further step
where gradients are reduced. A rank that has gone on nevertheless answers so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.objects import broadcast_object, describe_error
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session.context import Context, current
from hvlike.errors import StateError, UsageError
from hvlike.system.system import system
from hvlike.training.broadcast import pack, unpack
from hvlike.training.elastic.copies import copy_into
from hvlike.training.gradients.parameters import copy_options
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.training.zero.exchange import Partition
from hvlike.transport.messages.traffic import Topic
from hvlike.transport.world import Group

States = dict[int, Any]  # The state of each parameter, by its index


class Consolidated(NamedTuple):
    version: int  # How often it had changed then
    place: int  # Position of the rank that has it
    states: States | None  # None on the other ranks


class Share(NamedTuple):
    """What a rank answers: its state, pickled, and the tensors in it, in host memory; or why there is none."""

    status: str
    structure: bytes = b""
    tensors: Collection[Tensor] = ()


HERE = "has it"
BEHIND = "has made fewer steps"
AHEAD = "has made more steps"
GONE = "no longer has the optimizer, or does not answer"
LATE = "has not made the optimizer"

CATCH_UP_SECONDS = 10.0  # How long a rank that is behind may take to catch up: it may still be loading a state
_ANSWER_SECONDS = 120.0
_PAUSE_SECONDS = 0.02

Key = tuple[int, str]  # Number of the process set, and name of the optimizer in it


class StateService:
    def __init__(self, context: Context) -> None:
        self._channel = context.fabric.channel
        self._loop = context.fabric.loop
        self._optimizers: WeakValueDictionary[Key, ShardedState] = WeakValueDictionary()
        self._made: set[Key] = set()
        self._number = 0
        self._answers: dict[int, tuple[str, States]] = {}
        self._lost: set[int] = set()
        context.departures.listen(self._lost.update)
        self._channel.listen(Topic.ZERO_STATE, self._on_message)

    def register(self, key: Key, optimizer: ShardedState) -> None:
        """Answer for this optimizer as long as it is there. Local."""
        self._optimizers[key] = optimizer
        self._made.add(key)

    def fetch(self, rank: int, key: Key, version: int | None) -> tuple[str, States]:
        """Ask a rank of the job for its share, of this version. Blocks, but needs no call on that rank."""
        waited = 0.0
        while True:
            status, states = self._ask(rank, key, version)
            if status not in (BEHIND, LATE) or waited >= CATCH_UP_SECONDS:
                return status, states
            self._loop.wait(lambda: False, _PAUSE_SECONDS)
            waited += _PAUSE_SECONDS

    def _ask(self, rank: int, key: Key, version: int | None) -> tuple[str, States]:
        self._number += 1
        number = self._number
        self._channel.send_soon(rank, Topic.ZERO_STATE, ("ask", key, number, version))
        self._loop.wait(lambda: number in self._answers or rank in self._lost, _ANSWER_SECONDS)
        return self._answers.pop(number, (GONE, {}))

    def _on_message(self, rank: int, message: Any, tensors: list[Tensor]) -> None:
        what, *rest = message
        if what == "ask":
            key, number, version = rest
            optimizer = self._optimizers.get(key)
            try:
                if optimizer is None:
                    share = Share(GONE if key in self._made else LATE)
                else:
                    share = optimizer._snapshot(version)
            except Exception as error:  # __reduce__ of any class may raise anything
                share = Share(f"has a state that cannot be pickled ({describe_error(error)})")
            answer = ("answer", number, share.status, share.structure)
            self._channel.send(rank, Topic.ZERO_STATE, answer, list(share.tensors), kind="state")
        else:
            number, status, structure = rest
            self._answers[number] = status, unpack(structure, [], tensors) if structure else {}


def state_service(context: Context) -> StateService:
    service = _services.get(context)
    if service is None:
        service = _services[context] = StateService(context)
    return service


_services: WeakKeyDictionary[Context, StateService] = WeakKeyDictionary()


class StateLock:
    """Keeps changes of a state and copies of it apart, whichever thread makes them."""

    def __init__(self) -> None:
        self.under_way = False
        self._lock = system.Lock()

    @contextmanager
    def change(self) -> Iterator[None]:
        with self._lock:
            self.under_way = True
            try:
                yield
            finally:
                self.under_way = False

    @contextmanager
    def copy(self, *, wait: bool) -> Iterator[bool]:
        """Around a copy; yields whether it may be made. With `wait` it waits for another copy, never for a change."""
        if self.under_way or not self._lock.acquire(blocking=wait):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()


_ADVICE = "Pass the shards that all ranks saved after the same step, each once."


def make_shard(state: Mapping[str, Any], rank: int, size: int, step: int) -> dict[str, Any]:
    return {**state, "shard": {"rank": rank, "size": size, "step": step}}


def merge_shards(shards: Iterable[Mapping[str, Any]], wanted: Collection[int]) -> tuple[dict[str, Any], int]:
    """Return the state dict of the parameters `wanted`, by index, and its step; reads one shard at a time."""
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] | None = None
    seen: dict[int, tuple[int, int]] = {}
    for shard in shards:
        if "shard" not in shard:
            raise UsageError(
                "load_sharded_state_dict: expected what sharded_state_dict() has returned, got something with keys "
                f"{sorted(map(str, shard))}. A full state dict goes to load_state_dict()."
            )
        said = shard["shard"]
        rank, what = said["rank"], (said["size"], said["step"])
        if rank in seen:
            raise UsageError(f"load_sharded_state_dict: the shard of rank {rank} came twice. {_ADVICE}")
        other, expected = next(iter(seen.items()), (rank, what))
        if what != expected:
            raise UsageError(
                f"load_sharded_state_dict: the shard of rank {other} is one of {expected[0]} after step {expected[1]}, "
                f"that of rank {rank} is one of {what[0]} after step {what[1]}. {_ADVICE}"
            )
        seen[rank] = what
        groups = shard["param_groups"] if groups is None else groups
        state.update({place: value for place, value in shard["state"].items() if place in wanted})
    if groups is None:
        raise UsageError(f"load_sharded_state_dict: there are no shards. {_ADVICE}")
    size, step = next(iter(seen.values()))
    missing = [rank for rank in range(size) if rank not in seen]
    if missing:
        raise UsageError(f"load_sharded_state_dict: the shards of ranks {missing} of {size} are missing. {_ADVICE}")
    return {"state": state, "param_groups": groups}, step


class ShardedState(Optimizer):
    """The methods of ZeroRedundancyOptimizer that concern its state; that class sets the attributes."""

    rank: int
    world_size: int
    process_set: ProcessSet | None
    optim: Optimizer
    _partition: Partition
    _group: Group
    _groups: list[dict[str, Any]]
    _queue: PlannedQueue
    _step: int  # How many steps were made, also those in which this rank was absent
    _version: int  # How often the state has changed
    _changes: StateLock
    _consolidated: Consolidated | None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as the plain optimizer would have it in one process.

        After `consolidate_state_dict(to)` and until the next step it is on the rank `to` alone, in host memory. Without
        it any rank asks the others for their share. They answer in the background as long as they have made the same
        steps, as ranks that reduce gradients have, and have not ended. Not collective; blocks.

        Raises:
            RuntimeError: The state of another rank is not available.
        """
        state = super().state_dict()
        if self.world_size == 1:
            return state
        if self._consolidated is None or self._consolidated.version != self._version:
            self._consolidated = Consolidated(self._version, self.rank, self._collect(self._version))
        consolidated = self._consolidated
        if consolidated.states is None:
            raise self._not_consolidated(f"It is on rank {consolidated.place}.")
        return {**state, "state": dict(sorted(consolidated.states.items()))}

    def _collect(self, version: int | None) -> States:
        """Return copies of the states of all shares, in host memory."""
        with self._changes.copy(wait=True) as allowed:
            if not allowed:
                raise self._not_consolidated("It is changing: a step is under way.")
            share = self._share(copy=True)
        states: States = unpack(share.structure, [], list(share.tensors))
        for rank in self._group.ranks:
            if rank != self._group.ranks[self.rank]:
                key = self._group.number, self._queue.name
                status, found = state_service(current()).fetch(rank, key, version)
                if status != HERE:
                    raise self._not_consolidated(f"Rank {rank} {status}.")
                states.update(found)
        return states

    def _not_consolidated(self, why: str) -> StateError:
        return StateError(
            "Optimizer state has not been consolidated on this rank. Please call "
            f"`consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save the global state. "
            f"{why}"
        )

    def _snapshot(self, version: int | None) -> Share:
        """Compare this rank's state with a version; with a copy of its share if it has that one. In the loop."""
        if version is None:
            # This rank waits in consolidate_state_dict until it was sent: no copy is needed.
            return self._share(copy=False)
        with self._changes.copy(wait=False) as allowed:
            if self._version > version:
                return Share(AHEAD)
            if self._version < version or not allowed:
                # Not allowed: this rank is loading or copying its share. The other one asks again.
                return Share(BEHIND)
            return self._share(copy=True)

    def _share(self, *, copy: bool) -> Share:
        parameters, kept = self._partition.parameters, self.optim.state
        owned = ((place, parameters[place]) for place in self._partition.owned(self.rank))
        structure, tensors = pack({place: kept[each] for place, each in owned if each in kept}, [])
        form = torch.contiguous_format
        return Share(HERE, structure, [each.detach().to("cpu", copy=copy, memory_format=form) for each in tensors])

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all ranks to one, in host memory, where `state_dict()` returns it then.

        One rank after the other sends; beside the result only that rank may have its share in host memory once more.
        Collective over the process set; blocks.

        Args:
            to: Position of that rank in the process set.

        Raises:
            UsageError: There is no such rank.
            RuntimeError: On every rank: a rank has a state that cannot be pickled.
        """
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < self.world_size:
            raise UsageError(f"consolidate_state_dict: expected a rank from 0 to {self.world_size - 1}, got {to!r}.")
        copy_options(self._groups, self.optim.param_groups)
        self._consolidated = None
        if self.world_size == 1:
            return
        ranks = self.process_set or global_process_set
        barrier(process_set=ranks)
        states: States | None = None
        failure: StateError | None = None
        if self.rank == to:
            try:
                states = self._collect(None)
            except StateError as error:
                failure = error
            except Exception as error:  # __reduce__ of any class may raise anything
                failure = self._not_consolidated(f"Rank {self._group.ranks[to]} cannot: {describe_error(error)}.")
        # Until this has come, the others answer and keep their state as it is.
        wrong = broadcast_object(failure and str(failure), self._group.ranks[to], process_set=ranks)
        if wrong:
            raise failure or StateError(wrong)
        self._consolidated = Consolidated(self._version, to, states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parameters; this rank keeps its share. Local; every rank loads the same.

        Args:
            state_dict: From this class or from the plain optimizer; it is not changed.

        Raises:
            ValueError: The groups do not fit.
        """
        own = set(self._partition.owned(self.rank))
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = {number for place, number in enumerate(numbers) if place in own}
        kept = {key: value for key, value in state_dict["state"].items() if key in mine}
        with self._changes.change():
            super().load_state_dict({**state_dict, "state": kept})
            copy_options(self._groups, self.optim.param_groups)
            self.optim.__setstate__({"state": self.state, "param_groups": self.optim.param_groups})
            self.state = self.optim.state
            copy_options(self.optim.param_groups, self._groups)
            self._version += 1

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's share alone, for a file of its own on each rank. Local.

        It names its rank, the number of ranks and the step. `load_sharded_state_dict` puts the shards of all ranks
        together, on any number of ranks.
        """
        copy_options(self._groups, self.optim.param_groups)
        return make_shard(super().state_dict(), self.rank, self.world_size, self._step)

    def load_sharded_state_dict(self, shards: Iterable[Mapping[str, Any]]) -> None:
        """Load what `sharded_state_dict()` has returned on all ranks of this or another job, of any size.

        This rank keeps its share. Local; every rank loads the same.

        Args:
            shards: All shards, in any order; a generator that reads the files has one in memory at a time.

        Raises:
            UsageError: Shards are missing or of different steps.
            ValueError: The groups do not fit.
        """
        state, step = merge_shards(shards, self._partition.owned(self.rank))
        self.load_state_dict(state)
        self._step = step

    state_is_local = True
    """For elastic.TorchState: `local_state_dict` alone has the state; no rank needs that of all."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's share alone, for elastic.TorchState, which keeps a copy of it on another rank. Local."""
        return {**self.sharded_state_dict(), "process_set": self._set_number}

    def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
        """Go on from a commit, with the ranks there are now: the parameters are shared anew if their number changed.

        For elastic.TorchState. Collective over the process set; blocks.

        Args:
            states: What local_state_dict() has returned on all ranks, by rank; with as many ranks as now on this one.
                Empty: there was no commit, and this rank keeps its share, or load_state_dict() follows.
            ranks_before: How many ranks there were; 0: there was no commit.

        Raises:
            StateError: There was no commit, and this rank's share has become another one.
        """
        kept = self.sharded_state_dict()
        self._attach()
        if not states:
            if not ranks_before and kept["state"] and kept["shard"] != self.sharded_state_dict()["shard"]:
                raise StateError(
                    "ZeroRedundancyOptimizer: ranks were lost before the first commit, and with them a part of the "
                    "state that was loaded before elastic.run. Load it inside, after the first commit."
                )
            if ranks_before:
                # As in a job that starts from a checkpoint: a rank that has come anew has counted less.
                self._step = 0
            self._version = self._step
            return
        own = set(self._partition.owned(self.rank))
        shards = (
            {**shard, "state": copy_into(None, {key: each for key, each in shard["state"].items() if key in own})}
            for shard in states.values()
            if shard["process_set"] == self._set_number
        )
        if ranks_before == current().world.size:
            state: dict[str, Any] = next(shards)
            step = state["shard"]["step"]
        else:
            state, step = merge_shards(shards, own)
        self.load_state_dict(state)
        # A rank that has come anew has counted less.
        self._step = self._version = step

    @property
    def _set_number(self) -> int:
        return (self.process_set and self.process_set.process_set_id) or 0

    @abstractmethod
    def _attach(self) -> None:
        """Belong to the hvlike that runs now, and to its ranks. Collective over the process set."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._groups = state.pop("param_groups")
        super().__setstate__(state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "A ZeroRedundancyOptimizer cannot be copied or pickled: it belongs to ranks that work together. Save "
            "state_dict() after consolidate_state_dict(), make another one on every rank and load it there."
        )

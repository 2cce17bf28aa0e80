"""The state of a ZeroRedundancyOptimizer: brought together, saved as a whole or by shards, loaded."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from hvlike.collectives.persistent.planned_queue import PlannedQueue
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import current
from hvlike.errors import UsageError
from hvlike.training import usage_errors
from hvlike.training.gradients.parameters import copy_options
from hvlike.training.zero.partition import Partition
from hvlike.training.zero.state_transfer import (
    AHEAD,
    BEHIND,
    HERE,
    Consolidated,
    States,
    consolidate,
    copy_states,
    state_service,
)
from hvlike.transport.world import Group


class StateLock:
    """Keeps changes of a state and copies of it apart, whichever thread makes them."""

    def __init__(self) -> None:
        self.under_way = False
        """Some thread is changing the state."""
        self._lock = threading.Lock()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around a change; waits for a copy."""
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
    """Return a state dict of some parameters as a shard, with its rank, the number of ranks and the step."""
    return {**state, "shard": {"rank": rank, "size": size, "step": step}}


def merge_shards(shards: Iterable[Mapping[str, Any]], wanted: Collection[int]) -> tuple[dict[str, Any], int]:
    """Return the state dict of the parameters `wanted`, by index, and its step.

    The shards of all ranks come in any order, one at a time, so that they can be read as they are needed.
    Raises UsageError for shards that are missing or of different steps, and for what is no shard.
    """
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
        _check(seen, said["rank"], (said["size"], said["step"]))
        groups = shard["param_groups"] if groups is None else groups
        state.update({place: value for place, value in shard["state"].items() if place in wanted})
    if groups is None:
        raise UsageError(f"load_sharded_state_dict: there are no shards. {_ADVICE}")
    size, step = next(iter(seen.values()))
    missing = [rank for rank in range(size) if rank not in seen]
    if missing:
        raise UsageError(f"load_sharded_state_dict: the shards of ranks {missing} of {size} are missing. {_ADVICE}")
    return {"state": state, "param_groups": groups}, step


def _check(seen: dict[int, tuple[int, int]], rank: int, what: tuple[int, int]) -> None:
    if rank in seen:
        raise UsageError(f"load_sharded_state_dict: the shard of rank {rank} came twice. {_ADVICE}")
    for other, expected in seen.items():
        if what != expected:
            raise UsageError(
                f"load_sharded_state_dict: the shard of rank {other} is one of {expected[0]} after step {expected[1]}, "
                f"that of rank {rank} is one of {what[0]} after step {what[1]}. {_ADVICE}"
            )
        break
    seen[rank] = what


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
    _step: int
    """How many steps were made, also those in which this rank was absent."""
    _version: int
    """How often the state has changed."""
    _changes: StateLock
    _consolidated: Consolidated | None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as the plain optimizer would have it in one process.

        After `consolidate_state_dict(to)` and until the next step it is on the rank `to` alone, in host memory. Without
        it any rank asks the others for their share. They answer in the background as long as they have made the same
        steps, as ranks that reduce gradients have, and have not ended. Not collective; blocks.

        Raises:
            RuntimeError: The state of another rank is not available.

        Source: torch.distributed.optim.ZeroRedundancyOptimizer.state_dict.
        """
        state = super().state_dict()
        if self.world_size == 1:
            return state
        if self._consolidated is None or self._consolidated.version != self._version:
            self._consolidated = self._fetch()
        consolidated = self._consolidated
        if consolidated.states is None:
            raise usage_errors.not_consolidated(self.rank, f"It is on rank {consolidated.place}.")
        return {**state, "state": dict(sorted(consolidated.states.items()))}

    def _fetch(self) -> Consolidated:
        """Ask the other ranks for their share of the state, of this rank's version."""
        service = state_service(current())
        with self._changes.copy(wait=True) as allowed:
            if not allowed:
                raise usage_errors.not_consolidated(self.rank, "It is changing: a step is under way.")
            states = copy_states(self._own_states())
        for place, rank in enumerate(self._group.ranks):
            if place == self.rank:
                continue
            status, share = service.fetch(rank, (self._group.number, self._queue.name), self._version)
            if status != HERE:
                raise usage_errors.not_consolidated(self.rank, f"Rank {rank} {status}.")
            states.update(share)
        return Consolidated(self._version, self.rank, states)

    def _snapshot(self, version: int) -> tuple[str, States]:
        """Compare this rank's state with a version; also return a copy of its share if it has that one. In the loop."""
        with self._changes.copy(wait=False) as allowed:
            if self._version > version:
                return AHEAD, {}
            if self._version < version or not allowed:
                # Not allowed: this rank is loading or copying its share. The other one asks again.
                return BEHIND, {}
            return HERE, copy_states(self._own_states())

    def _own_states(self) -> States:
        """The state of each parameter of this rank's share, by index."""
        kept = self.optim.state
        parameters = self._partition.parameters
        return {
            place: kept[parameters[place]] for place in self._partition.owned(self.rank) if parameters[place] in kept
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all ranks to one, in host memory, where `state_dict()` returns it then.

        One rank after the other sends; beside the result there are never more than two parts of 16 MiB in memory.
        Collective over the process set; blocks.

        Args:
            to: Position of that rank in the process set.

        Raises:
            UsageError: There is no such rank.

        Source: torch.distributed.optim.ZeroRedundancyOptimizer.consolidate_state_dict.
        """
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < self.world_size:
            raise UsageError(f"consolidate_state_dict: expected a rank from 0 to {self.world_size - 1}, got {to!r}.")
        copy_options(self._groups, self.optim.param_groups)
        self._consolidated = None
        states = consolidate(self._own_states(), to, self.rank, self.world_size, self.process_set)
        self._consolidated = Consolidated(self._version, to, states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parameters; this rank keeps its share. Local; every rank loads the same.

        Args:
            state_dict: From this class or from the plain optimizer; it is not changed.

        Raises:
            ValueError: The groups do not fit.

        Source: torch.optim.Optimizer.load_state_dict.
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set loaded groups and state, for Optimizer.load_state_dict."""
        self._groups = state.pop("param_groups")
        super().__setstate__(state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise usage_errors.not_copied()

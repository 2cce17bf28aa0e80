"""Shards: the state that one rank keeps, saved by itself, and put together again for any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hvlike.errors import UsageError

_ADVICE = "Pass the shards that all ranks saved after the same step, each once."


def make_shard(state: Mapping[str, Any], rank: int, size: int, step: int) -> dict[str, Any]:
    """Return a state dict of some parameters as a shard: it says whose it is, of how many, and after which step."""
    return {**state, "shard": {"rank": rank, "size": size, "step": step}}


def merge_shards(shards: Iterable[Mapping[str, Any]], wanted: Collection[int]) -> tuple[dict[str, Any], int]:
    """Return the state dict of the parameters `wanted`, by place, and the step it is of. Pure function.

    shards: what make_shard has made, of all ranks, in any order. One is looked at at a time, so they can be read as
    they are needed. Raises: UsageError for shards that are missing, of different steps, or no shards.
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

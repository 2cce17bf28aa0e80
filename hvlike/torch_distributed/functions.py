"""dist.monitored_barrier and dist.split_group for groups of hvlike. torch has them for gloo, and for nccl, alone.

The two functions of torch.distributed are replaced when the first group is made, by ones that ask whose group it is:
for all others they call torch's. Names that a program has imported from torch.distributed before stay torch's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import current
from hvlike.errors import StalledError, UsageError
from hvlike.torch_distributed.groups import meet

if TYPE_CHECKING:
    from hvlike.torch_distributed.process_group import ProcessGroup


def extend_functions(kind: type[ProcessGroup]) -> None:
    """Have the functions of torch.distributed serve groups of this kind too. A second call does nothing."""
    of_torch = c10d.split_group, c10d.monitored_barrier
    if hasattr(of_torch[0], "of_torch"):
        return

    @functools.wraps(of_torch[0])
    def split_group(parent_pg: Any = None, split_ranks: Any = None, *others: Any, **named: Any) -> Any:
        parent: Any = parent_pg or dist.group.WORLD
        split = _split if isinstance(parent, kind) else of_torch[0]
        return split(parent, split_ranks, *others, **named)

    @functools.wraps(of_torch[1])
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        of: Any = dist.group.WORLD if group is None else group
        (_monitored_barrier if isinstance(of, kind) else of_torch[1])(of, timeout, wait_all_ranks)

    for mine, its in zip((split_group, monitored_barrier), of_torch, strict=True):
        mine.of_torch = its  # type: ignore[attr-defined]
        for module in (dist, c10d):
            setattr(module, its.__name__, mine)


def _split(
    parent: ProcessGroup,
    split_ranks: Sequence[Sequence[int]] | None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """The group of this rank's part, or None. split_ranks: places in the parent."""
    parts = [list(part) for part in split_ranks or ()]
    places = [place for part in parts for place in part]
    if not parts or not all(parts):
        raise UsageError(f"split_group: split_ranks must be parts of at least one rank each, got {split_ranks}.")
    if len(set(places)) < len(places) or not set(places) <= set(range(parent.size())):
        raise UsageError(
            f"split_group: split_ranks={split_ranks}: each of the {parent.size()} places in the parent, 0 to "
            f"{parent.size() - 1}, may stand in one part, once."
        )
    ranks = dist.get_process_group_ranks(parent)
    for part in parts:
        if parent.rank() in part:
            return dist.new_group(
                [ranks[place] for place in sorted(part)],
                timeout=timeout,
                backend=backend or dist.get_backend(parent),
                pg_options=pg_options,
                group_desc=group_desc or f"{parent.getGroupDesc()}:split",
                # The ranks of the parent call this, and perhaps no others.
                use_local_synchronization=True,
                sort_ranks=False,
            )
    return None


def _monitored_barrier(group: ProcessGroup, timeout: timedelta | float | None, wait_all_ranks: bool) -> None:
    """Wait for all members. Each that has come in time learns from the first one who has not."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or group.calls.seconds
    running = current()
    loop = running.fabric.loop
    ranks = dist.get_process_group_ranks(group)
    key = (f"monitored_barrier {next(group.monitored_barriers)}", group.calls.name)
    task = loop.start(meet(running.fabric, ranks, key, time.monotonic() + seconds), wake=False)
    loop.wait(lambda: task.done)
    if task.error is not None:
        raise task.error
    if task.result:
        missing = task.result if wait_all_ranks else task.result[:1]
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise StalledError(
            f"[Rank {running.world.rank}]: {who} failed to pass monitoredBarrier in {round(1000 * seconds)} ms. Of the "
            f"group with {name_ranks(ranks)} these had not called it in time."
        )

"""What torch has of its process, for simulated ranks: the groups of torch.distributed, and waits for futures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from support.simulation.machine.scheduler import POLLED, Scheduler

from hvlike.system.system import of_process

_Future: Any = torch._C.Future
_in_c: Any = torch._C._distributed_c10d


class World:
    """The groups that a rank knows, in place of torch's `_World`, which keeps them in its module."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []


_world = of_process(World)


@contextmanager
def torch_of_ranks(scheduler: Scheduler) -> Iterator[None]:
    """Let each rank have its own groups, and let others go on while a thread waits for a future."""
    of_torch: Any = c10d
    wait_in_c, world, hook = _Future.wait, of_torch._world, sys.excepthook

    def wait(future: Any) -> Any:
        if scheduler.current is not None:
            scheduler.block(future.done, None, "waits for a future", POLLED)
        return wait_in_c(future)

    _Future.wait, of_torch._world = wait, _world
    # The names of groups are then known by thread: every rank has groups of the same names.
    _in_c._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _in_c._set_thread_isolation_mode(False)
        # init_process_group puts its own one before it.
        _Future.wait, of_torch._world, sys.excepthook = wait_in_c, world, hook

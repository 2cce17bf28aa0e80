"""What benchmarks of calls share: a session of RPC in which rank 0 measures, and TensorPipe's pair beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc as torch_rpc

import hvlike
from hvlike import rpc
from hvlike.bench.conditions import describe_alone
from hvlike.bench.rpc_pair import Pair
from hvlike.bench.rpc_work import CALLEE
from hvlike.errors import LaunchError

_ended = threading.Event()
"""Set on rank 1 when rank 0 is through."""


@dataclass(frozen=True)
class Setting:
    """Where it is measured."""

    conditions: dict[str, Any]
    cores: Sequence[Sequence[int]]
    """Of each rank."""


@contextmanager
def session(benchmark: str) -> Iterator[Setting]:
    """From the start of RPC to the end of hvlike. Collective; hvlike is initialised on two ranks."""
    conditions = describe_alone(benchmark)
    cores = hvlike.allgather_object(sorted(os.sched_getaffinity(0)), name="bench.cores")
    rpc.init_rpc(f"worker{hvlike.rank()}")
    yield Setting(conditions, cores)
    rpc.shutdown()
    hvlike.shutdown()


def let_rank_0_end() -> None:
    """Rank 0 is through with its calls: rank 1 sleeps here until it is. Collective."""
    if hvlike.rank() == 0:
        rpc.rpc_sync(CALLEE, _end)
    else:
        _ended.wait()


def _end() -> None:
    _ended.set()


@contextmanager
def tensorpipe(cores: Sequence[Sequence[int]], without: str | None) -> Iterator[Pair | str]:
    """TensorPipe's processes, or why they take no part. without: such a reason, from the user. On rank 0."""
    pair = _start(cores) if without is None else without
    try:
        yield pair
    finally:
        if isinstance(pair, Pair):
            pair.close()


def _start(cores: Sequence[Sequence[int]]) -> Pair | str:
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its processes here are on one"
    if not torch_rpc.is_available():
        return "this torch was built without it"
    try:
        return Pair(cores)
    except (LaunchError, OSError) as error:
        return str(error)

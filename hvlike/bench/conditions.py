"""The conditions of a run, without which its figures say nothing."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch

import hvlike
from hvlike.transport.raw import RawMpi


def describe(benchmark: str, raw: RawMpi) -> dict[str, Any]:
    """Return what was measured with what; hvlike is initialised."""
    return {
        "benchmark": benchmark,
        "ranks": hvlike.size(),
        "nodes": hvlike.size() // hvlike.local_size() if hvlike.is_homogeneous() else "uneven",
        "cores": len(os.sched_getaffinity(0)),
        "hvlike": hvlike.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "mpi": raw.library,
    }


def describe_alone(benchmark: str) -> dict[str, Any]:
    """The same where plain MPI is no contestant. Collective."""
    raw = RawMpi()
    conditions = describe(benchmark, raw)
    raw.free()
    return conditions


def runs_on_two_ranks(benchmark: str) -> bool:
    """Start hvlike for a benchmark of two ranks; on another number say so on rank 0, and end it. Collective."""
    hvlike.init()
    if hvlike.size() == 2:
        return True
    if hvlike.rank() == 0:
        print(f"bench {benchmark} is for two ranks: mpirun -n 2 python -m hvlike bench {benchmark}", file=sys.stderr)
    hvlike.shutdown()
    return False


def heading(conditions: dict[str, Any]) -> str:
    """One line of them for the head of a table."""
    horovod = f", Horovod {conditions['horovod']}" if conditions.get("horovod") else ""
    gpus = (
        f"{conditions['gpus']} x {conditions['device']}, {conditions['ranks_per_gpu']} rank(s) on each\n"
        if "gpus" in conditions
        else ""
    )
    return (
        f"{gpus}{conditions['ranks']} ranks on {conditions['nodes']} node(s), {conditions['cores']} cores for rank 0, "
        f"{conditions['torch_threads']} thread(s) each\n"
        f"hvlike {conditions['hvlike']}, torch {conditions['torch']}, "
        f"Python {conditions['python']}, {conditions['mpi']}{horovod}"
    )

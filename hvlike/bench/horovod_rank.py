"""One rank of the Horovod job that benchmarks compare with: it answers requests of hvlike/bench/peers.py.

Horovod runs only during its turns: between them it is shut down, and this process sleeps on its socket. Its thread
would slow down everything beside it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
import torch

from hvlike.bench.harness.comparison import SCRUB_BYTES, Contestant
from hvlike.bench.harness.processes import requests
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import DTYPES, HOROVOD, Case
from hvlike.bench.trainers import WORKLOADS, Trainer, expected_gradients
from hvlike.errors import HvlikeError
from hvlike.transport.memory.dtypes import Array

# After each start Horovod negotiates and allocates anew; so many calls later it is as fast as one that stayed up.
_WARM_UPS = 6


def allreduce(horovod: Any, raw: RawMpi, request: dict[str, Any]) -> Contestant:
    case = Case(request["size"], DTYPES[request["dtype"]], request["average"])
    tensor = torch.zeros(case.length, dtype=case.dtype)
    name, op = f"bench.{case.dtype_name}.{case.length}", horovod.Average if case.average else horovod.Sum
    return Contestant(
        HOROVOD,
        lambda: case.fill(tensor, raw.rank),
        lambda: horovod.allreduce_(tensor, op=op, name=name),
        lambda: case.verify(tensor, HOROVOD, raw.rank, raw.size),
    )


def training(horovod: Any, raw: RawMpi, request: dict[str, Any]) -> Contestant:
    """Return steps with Horovod's DistributedOptimizer. The first one is checked here."""
    workload, seed = WORKLOADS[request["model"]], request["seed"]
    trainer = Trainer(HOROVOD, workload, seed, raw.rank)
    named = list(trainer.model.named_parameters())
    trainer.optimizer = horovod.DistributedOptimizer(trainer.optimizer, named_parameters=named)
    expected = expected_gradients(workload.model(seed), trainer.batch, raw)
    trainer.step()
    trainer.verify_gradients(expected, raw.rank)
    # A step begins with the one before it: there is nothing to prepare.
    return Contestant(HOROVOD, lambda: None, trainer.step, lambda: trainer.verify_replicas(raw))


WORK: dict[str, Callable[[Any, RawMpi, dict[str, Any]], Contestant]] = {"allreduce": allreduce, "step": training}


def serve(connected: Connection) -> None:
    """Greet, then answer request after request until the benchmark hangs up, each with Horovod running."""
    raw, horovod, private = RawMpi(), importlib.import_module("horovod.torch"), np.ones(SCRUB_BYTES // 8)
    version = getattr(importlib.import_module("horovod"), "__version__", "of unknown version")
    connected.send((raw.rank, str(version)))
    work: Contestant | None = None
    cold = False
    for request in requests(connected):
        answer: dict[str, object] = {}
        if "cores" in request:
            os.sched_setaffinity(0, request["cores"])
        try:
            horovod.init()
            try:
                if "work" in request:
                    work, cold = WORK[request["work"]](horovod, raw, request), request["cold"]
                if work is not None and "times" in request:
                    answer = {"seconds": turn(work, request["times"], raw, private if cold else None)}
                if work is not None and "check" in request:
                    work.verify()
            finally:
                horovod.shutdown()
        except (HvlikeError, RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        connected.send(answer)


def turn(work: Contestant, times: int, raw: RawMpi, scrub: Array | None) -> float:
    """Return the seconds of the work, so many times. scrub: other memory to touch before it."""

    def run() -> None:
        for _ in range(times):
            work.run()

    for _ in range(_WARM_UPS):
        work.run()
    if scrub is not None:
        np.add(scrub, 1.0, out=scrub)
    return replace(work, run=run).turn(raw)


if __name__ == "__main__":
    with Client(sys.argv[1]) as connected:
        serve(connected)

"""One rank of the Horovod job that benchmarks compare with: it answers requests of hvlike/bench/peers.py.

Horovod runs only during its turns: between them it is shut down, and this process sleeps on its socket. Its thread
would slow down everything beside it.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvlike.bench.harness.comparison import SCRUB_BYTES, Contestant
from hvlike.bench.harness.processes import JsonSocket, Message
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import DTYPES, HOROVOD, Case
from hvlike.bench.trainers import WORKLOADS, Trainer, expected_gradients, verify_gradients, verify_replicas
from hvlike.errors import HvlikeError

# After each start Horovod negotiates and allocates anew; so many calls later it is as fast as one that stayed up.
_WARM_UPS = 6


def allreduce(horovod: Any, raw: RawMpi, request: Message) -> Contestant:
    case = Case(request["size"], DTYPES[request["dtype"]], request["average"])
    tensor = torch.zeros(case.length, dtype=case.dtype)
    name, op = f"bench.{case.dtype_name}.{case.length}", horovod.Average if case.average else horovod.Sum
    return Contestant(
        HOROVOD,
        lambda: case.fill(tensor, raw.rank),
        lambda: horovod.allreduce_(tensor, op=op, name=name),
        lambda: case.verify(tensor, HOROVOD, raw.rank, raw.size),
    )


def training(horovod: Any, raw: RawMpi, request: Message) -> Contestant:
    """Return steps with Horovod's DistributedOptimizer. The first one is checked here."""
    workload, seed = WORKLOADS[request["model"]], request["seed"]
    trainer = Trainer(HOROVOD, workload, seed, raw.rank)
    named = list(trainer.model.named_parameters())
    trainer.optimizer = horovod.DistributedOptimizer(trainer.optimizer, named_parameters=named)
    expected = expected_gradients(workload.model(seed), trainer.batch, raw)
    trainer.step()
    verify_gradients(trainer, expected, raw.rank)
    # A step begins with the one before it: there is nothing to prepare.
    return Contestant(HOROVOD, lambda: None, trainer.step, lambda: verify_replicas(trainer, raw))


WORK: dict[str, Callable[[Any, RawMpi, Message], Contestant]] = {"allreduce": allreduce, "step": training}


class Partner:
    def __init__(self, connected: JsonSocket) -> None:
        self._socket = connected
        self._raw = RawMpi()
        self._horovod: Any = importlib.import_module("horovod.torch")
        self._work: Contestant | None = None
        self._cold = False
        self._private = np.ones(SCRUB_BYTES // 8)

    def serve(self) -> None:
        """Greet, then answer request after request, each with Horovod running."""
        version = getattr(importlib.import_module("horovod"), "__version__", "of unknown version")
        self._socket.send({"rank": self._raw.rank, "version": version})
        while (request := self._socket.receive()) is not None:
            if "cores" in request:
                os.sched_setaffinity(0, request["cores"])
            self._socket.send(self._answer(request))

    def _answer(self, request: Message) -> Message:
        try:
            self._horovod.init()
            try:
                return self._do(request)
            finally:
                self._horovod.shutdown()
        except (HvlikeError, RuntimeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _do(self, request: Message) -> Message:
        if "work" in request:
            self._work = WORK[request["work"]](self._horovod, self._raw, request)
            self._cold = request["cold"]
        if self._work is not None and "times" in request:
            return {"seconds": self._turn(self._work, request["times"])}
        if self._work is not None and "check" in request:
            self._work.verify()
        return {}

    def _turn(self, work: Contestant, times: int) -> float:
        for _ in range(_WARM_UPS):
            work.run()
        if self._cold:
            np.add(self._private, 1.0, out=self._private)
        work.prepare()
        self._raw.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work.run()
        return time.perf_counter() - start


def main(address: str) -> None:
    """Connect to the benchmark that listens at this path and serve it."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address)
        Partner(JsonSocket(connected)).serve()


if __name__ == "__main__":
    main(sys.argv[1])

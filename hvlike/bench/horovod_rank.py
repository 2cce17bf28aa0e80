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
from typing import Any, Protocol

import numpy as np
import torch

from hvlike.bench.harness.comparison import SCRUB_BYTES
from hvlike.bench.harness.processes import JsonSocket, Message
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import DTYPES, HOROVOD, Case
from hvlike.bench.trainers import WORKLOADS, Trainer, expected_gradients, verify_gradients, verify_replicas
from hvlike.errors import HvlikeError

# After each start Horovod negotiates and allocates anew; so many calls later it is as fast as one that stayed up.
_WARM_UPS = 6


class Work(Protocol):
    """What is measured; Horovod is running during each of these calls."""

    def prepare(self) -> None:
        """Make the input anew."""

    def run(self, times: int) -> None:
        """Do it so many times."""

    def check(self) -> None:
        """Look at what was done. Raises: HvlikeError."""


class Allreduce:
    """A sum or average of one tensor, in place."""

    def __init__(self, horovod: Any, raw: RawMpi, request: Message) -> None:
        self._horovod, self._raw = horovod, raw
        self._case = Case(request["size"], DTYPES[request["dtype"]], request["average"])
        self._tensor = torch.zeros(self._case.length, dtype=self._case.dtype)

    def prepare(self) -> None:
        """Fill the tensor."""
        self._case.fill(self._tensor, self._raw.rank)

    def run(self, times: int) -> None:
        """Reduce so many times."""
        op = self._horovod.Average if self._case.average else self._horovod.Sum
        for _ in range(times):
            self._horovod.allreduce_(self._tensor, op=op, name=f"bench.{self._case.dtype_name}.{self._case.length}")

    def check(self) -> None:
        """Compare the last result with the right one."""
        self._case.verify(self._tensor, HOROVOD, self._raw.rank, self._raw.size)


class Training:
    """Steps with Horovod's DistributedOptimizer; the first one is checked at once."""

    def __init__(self, horovod: Any, raw: RawMpi, request: Message) -> None:
        self._raw = raw
        workload, seed = WORKLOADS[request["model"]], request["seed"]
        self._trainer = trainer = Trainer(HOROVOD, workload, seed, raw.rank)
        named = list(trainer.model.named_parameters())
        trainer.optimizer = horovod.DistributedOptimizer(trainer.optimizer, named_parameters=named)
        expected = expected_gradients(workload.model(seed), trainer.batch, raw)
        trainer.step()
        verify_gradients(trainer, expected, raw.rank)

    def prepare(self) -> None:
        """Do nothing: a step begins with the one before it."""

    def run(self, times: int) -> None:
        """Train so many steps."""
        self._trainer.steps(times)

    def check(self) -> None:
        """Compare the replicas."""
        verify_replicas(self._trainer, self._raw)


WORK: dict[str, Callable[[Any, RawMpi, Message], Work]] = {"allreduce": Allreduce, "step": Training}


class Partner:
    """Answers the requests of the benchmark until it hangs up."""

    def __init__(self, connected: JsonSocket) -> None:
        self._socket = connected
        self._raw = RawMpi()
        self._horovod: Any = importlib.import_module("horovod.torch")
        self._work: Work | None = None
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
            self._work.check()
        return {}

    def _turn(self, work: Work, times: int) -> float:
        work.run(_WARM_UPS)
        if self._cold:
            np.add(self._private, 1.0, out=self._private)
        work.prepare()
        self._raw.barrier()
        start = time.perf_counter()
        work.run(times)
        return time.perf_counter() - start


def main(address: str) -> None:
    """Connect to the benchmark that listens at this path and serve it."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address)
        Partner(JsonSocket(connected)).serve()


if __name__ == "__main__":
    main(sys.argv[1])

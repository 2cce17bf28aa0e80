"""Who is measured beside hvlike in this run: MPI, torch.distributed, and Horovod in a job of its own.

Rank 0 starts Horovod's job, with as many ranks, each on the cores of one of ours. While it runs, our ranks sleep; while
they run, its processes sleep, and Horovod is shut down: its thread would slow down everything beside it. Its ranks run
this file (`python -m hvlike.bench.peers`) and answer requests.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
import torch

import hvlike
from hvlike.bench.harness.benchmark import describe
from hvlike.bench.harness.comparison import SCRUB_BYTES, Contestant
from hvlike.bench.harness.processes import Helpers, find_launcher, module_command, requests
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import DTYPES, HOROVOD, BenchTensor, backend_for, start_torch_group, torch_unavailable
from hvlike.bench.trainers import WORKLOADS, BenchTrainer, expected_gradients
from hvlike.errors import HvlikeError, LaunchError
from hvlike.launch.run import without_launcher
from hvlike.transport.memory.dtypes import Array

# After each start Horovod negotiates and allocates anew; so many calls later it is as fast as one that stayed up.
_WARM_UPS = 6


class HorovodJob:
    """The other job as all ranks of ours see it. Every method is collective, and a rank that waits in it sleeps."""

    def __init__(self, cores: list[list[int]]) -> None:
        """Start it on rank 0, each rank on the cores of one of ours. Raises: LaunchError on every rank."""
        self._helpers = Helpers("Horovod's job") if hvlike.rank() == 0 else None
        self.version: str = self._on_rank_0(lambda helpers: self._start(helpers, cores))

    def _on_rank_0(self, work: Callable[[Helpers], Any]) -> Any:
        """Return the answer of this work on every rank, or raise its error as a LaunchError."""
        answer, failure = None, None
        if self._helpers is not None:
            try:
                answer = work(self._helpers)
            except (HvlikeError, OSError) as error:
                failure = str(error)
                # Our ranks may end now, and would end the other job in the middle of its work.
                self.close()
        answer, failure = hvlike.broadcast_object((answer, failure), name="bench.horovod")
        if failure is not None:
            raise LaunchError(failure)
        return answer

    def _start(self, helpers: Helpers, cores: list[list[int]]) -> str:
        """Returns the version of Horovod. Raises: LaunchError, OSError."""
        launcher = find_launcher()
        connections = helpers.start_job(
            lambda address: module_command(launcher, len(cores), "hvlike.bench.peers", [address]),
            len(cores),
            env=without_launcher(os.environ),
        )
        greetings: dict[int, tuple[Connection, str]] = {}
        for connected in connections:
            rank, version = helpers.ask(connected)
            greetings[rank] = connected, version
        helpers.ends = [greetings[rank][0] for rank in range(len(cores))]
        self._ask_each(helpers, [{"cores": each} for each in cores])
        return greetings[0][1]

    def _ask_each(self, helpers: Helpers, requests: list[dict[str, Any]]) -> float:
        """Send one request to each rank and wait for all answers; returns the most seconds. Raises: HvlikeError."""
        try:
            for connected, request in zip(helpers.ends, requests, strict=True):
                connected.send(request)
        except OSError as error:
            raise helpers.failure("no answer") from error
        answers = [helpers.ask(connected) for connected in helpers.ends]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise HvlikeError(f"Horovod's job, rank {rank}: {answer['error']}")
        return max(float(answer.get("seconds", 0.0)) for answer in answers)

    def ask(self, request: dict[str, Any]) -> float:
        """Return the seconds of the slowest of Horovod's ranks, 0 where none are counted. Raises: LaunchError."""
        return float(self._on_rank_0(lambda helpers: self._ask_each(helpers, [request] * len(helpers.ends))))

    def contestant(self, times: int = 1) -> Contestant:
        """Return what the other job was last asked to do, so many times a turn."""
        return Contestant(HOROVOD, lambda: None, lambda: self.ask({"times": times}), lambda: self.ask({"check": True}))

    def close(self) -> None:
        """End the other job, if a failure has not. Local."""
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None


def start_horovod(device: torch.device) -> HorovodJob | str:
    if device.type != "cpu":
        return "its part of this benchmark measures the CPU"
    if importlib.util.find_spec("horovod") is None:
        return "not installed"
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its job here is on one"
    try:
        return HorovodJob(hvlike.allgather_object(sorted(os.sched_getaffinity(0)), name="bench.horovod.cores"))
    except LaunchError as error:
        return str(error)


@dataclass(frozen=True)
class Peers:
    device: torch.device
    raw: RawMpi
    backend: str | None  # Of torch's default process group; None: there is none
    horovod: HorovodJob | None
    left_out: list[str]  # One sentence for each that does not take part

    def describe(self, benchmark: str) -> dict[str, Any]:
        conditions = {**describe(benchmark), "device": "cpu"}
        if self.device.type != "cpu":
            gpus = min(torch.cuda.device_count(), hvlike.local_size())
            conditions |= {
                "device": torch.cuda.get_device_name(self.device),
                "gpus": gpus,
                "ranks_per_gpu": -(-hvlike.local_size() // gpus),
                "nccl": hvlike.nccl_built(),
            }
        version = self.horovod.version if self.horovod else None
        return {**conditions, "horovod": version, "left_out": self.left_out}


@contextmanager
def peers(without_torch: str | None, without_horovod: str | None, device: str = "cpu") -> Iterator[Peers]:
    """Start hvlike, and beside it MPI, torch's group and Horovod where they are available; end them after the work.

    without_torch, without_horovod: why this run leaves it out; None: it takes part if it can. device: where the
    tensors are; decides over the backend of torch's group. Collective.
    """
    hvlike.init()
    pinned, raw, left_out = hvlike.pin_device(device), RawMpi(), []
    backend = backend_for(pinned)
    reason = without_torch or torch_unavailable(backend)
    if reason is None:
        start_torch_group(backend)
    else:
        left_out.append(f"Without {backend}: {reason}.")
    started = without_horovod or start_horovod(pinned)
    horovod = started if isinstance(started, HorovodJob) else None
    if horovod is None:
        left_out.append(f"Without Horovod: {started}.")
    # Nothing is closed after an error: the ranks no longer do the same, and one that waits would wait in vain.
    yield Peers(pinned, raw, backend if reason is None else None, horovod, left_out)
    if horovod is not None:
        horovod.close()
    if reason is None:
        end_group: Any = torch.distributed.destroy_process_group
        end_group()
    raw.free()
    hvlike.shutdown()


def _allreduce(horovod: Any, raw: RawMpi, request: dict[str, Any]) -> Contestant:
    case = BenchTensor(request["size"], DTYPES[request["dtype"]], request["average"])
    tensor = torch.zeros(case.length, dtype=case.dtype)
    name, op = f"bench.{case.dtype_name}.{case.length}", horovod.Average if case.average else horovod.Sum
    return Contestant(
        HOROVOD,
        lambda: case.fill(tensor, raw.rank),
        lambda: horovod.allreduce_(tensor, op=op, name=name),
        lambda: case.verify(tensor, HOROVOD, raw.rank, raw.size),
    )


def _training(horovod: Any, raw: RawMpi, request: dict[str, Any]) -> Contestant:
    """Return steps with Horovod's DistributedOptimizer. The first one is checked here."""
    workload, seed = WORKLOADS[request["model"]], request["seed"]
    trainer = BenchTrainer(HOROVOD, workload, seed, raw.rank)
    named = list(trainer.model.named_parameters())
    trainer.optimizer = horovod.DistributedOptimizer(trainer.optimizer, named_parameters=named)
    expected = expected_gradients(workload.model(seed), trainer.batch, raw)
    trainer.step()
    trainer.verify_gradients(expected, raw.rank)
    # A step begins with the one before it: there is nothing to prepare.
    return Contestant(HOROVOD, lambda: None, trainer.step, lambda: trainer.verify_replicas(raw))


_WORK: dict[str, Callable[[Any, RawMpi, dict[str, Any]], Contestant]] = {"allreduce": _allreduce, "step": _training}


def _serve(connected: Connection) -> None:
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
                    work, cold = _WORK[request["work"]](horovod, raw, request), request["cold"]
                if work is not None and "times" in request:
                    answer = {"seconds": _turn(work, request["times"], raw, private if cold else None)}
                if work is not None and "check" in request:
                    work.verify()
            finally:
                horovod.shutdown()
        except (HvlikeError, RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        connected.send(answer)


def _turn(work: Contestant, times: int, raw: RawMpi, scrub: Array | None) -> float:
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
        _serve(connected)

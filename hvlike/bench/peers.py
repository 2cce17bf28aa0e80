"""Who is measured beside hvlike in this run: MPI, torch.distributed, and Horovod in a job of its own.

Rank 0 starts Horovod's job, with as many ranks, each on the cores of one of ours. While it runs, our ranks sleep; while
they run, its processes sleep.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import hvlike
from hvlike.bench.harness.benchmark import describe, describe_device
from hvlike.bench.harness.comparison import Ranks
from hvlike.bench.harness.processes import Helpers, JsonSocket, Message, find_launcher, module_command
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import HOROVOD, TorchGroup, backend_for, torch_unavailable
from hvlike.errors import HvlikeError, LaunchError

# What belongs to our own job and must not reach another one.
_OURS = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
_CPU = torch.device("cpu")
_START_SECONDS = 120.0
_POLL_SECONDS = 0.2


class HorovodJob:
    """The other job as all ranks of ours see it. Every method is collective, and a rank that waits in it sleeps."""

    def __init__(self, cores: list[list[int]]) -> None:
        """Start it on rank 0, each rank on the cores of one of ours. Raises: LaunchError on every rank."""
        self._helpers: Helpers | None = None
        version, reason = "", None
        if hvlike.rank() == 0:
            self._helpers = Helpers("Horovod's job")
            try:
                version = self._start(self._helpers, cores)
            except (LaunchError, OSError) as error:
                self._helpers.end()
                reason = str(error)
        self.version, reason = hvlike.broadcast_object((version, reason), name="bench.horovod.started")
        if reason is not None:
            raise LaunchError(reason)

    def _start(self, helpers: Helpers, cores: list[list[int]]) -> str:
        """Start the job and greet its ranks; returns the version of Horovod. Raises: LaunchError, OSError."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
        with tempfile.TemporaryDirectory(prefix="hvlike-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "socket")
            listener.bind(address)
            listener.listen(len(cores))
            listener.settimeout(_POLL_SECONDS)
            command = module_command(find_launcher(), len(cores), "hvlike.bench.horovod_rank", [address])
            process = helpers.start(command, env=environment)
            greetings: dict[int, tuple[JsonSocket, str]] = {}
            end = time.monotonic() + _START_SECONDS
            while len(greetings) < len(cores):
                try:
                    connected = helpers.connect(listener.accept()[0])
                except TimeoutError:
                    if process.poll() is not None or time.monotonic() > end:
                        raise helpers.failure("did not start") from None
                    continue
                hello = helpers.receive(connected)
                greetings[hello["rank"]] = connected, str(hello["version"])
        helpers.sockets = [greetings[rank][0] for rank in range(len(cores))]
        self._ask_each(helpers, [{"cores": each} for each in cores])
        return greetings[0][1]

    def _ask_each(self, helpers: Helpers, requests: list[Message]) -> float:
        """Send one request to each rank and wait for all answers; returns the most seconds. Raises: HvlikeError."""
        try:
            for connected, request in zip(helpers.sockets, requests, strict=True):
                connected.send(request)
        except OSError as error:
            raise helpers.failure("no answer") from error
        answers = [helpers.receive(connected) for connected in helpers.sockets]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise HvlikeError(f"Horovod's job, rank {rank}: {answer['error']}")
        return max(float(answer.get("seconds", 0.0)) for answer in answers)

    def ask(self, request: Message) -> float:
        """Send a request to all of Horovod's ranks; returns the seconds of the slowest, 0 where none are counted.

        Raises: HvlikeError on every rank when one of them fails.
        """
        seconds: float = 0.0
        failure: str | None = None
        if self._helpers is not None:
            try:
                seconds = self._ask_each(self._helpers, [request] * len(self._helpers.sockets))
            except HvlikeError as error:
                failure = str(error)
                # Our ranks end now, and would end the other job in the middle of its work.
                self.close()
        seconds, failure = hvlike.broadcast_object((seconds, failure), name="bench.horovod.turn")
        if failure is not None:
            raise HvlikeError(failure)
        return seconds

    def close(self) -> None:
        """End the other job, if a failure has not. Local."""
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None


def start_horovod(device: torch.device) -> HorovodJob | str:
    """Start Horovod's job, or return why it takes no part. Collective."""
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
class HorovodEntrant:
    """What Horovod's job is doing, as an entrant of a comparison."""

    job: HorovodJob
    times: int = 1
    name: str = HOROVOD

    def turn(self, ranks: Ranks) -> float:
        """Do the work once. Collective. Returns the seconds of its slowest rank."""
        ranks.barrier()
        return self.job.ask({"times": self.times})

    def check(self) -> None:
        """Check the results. Collective. Raises: HvlikeError."""
        self.job.ask({"check": True})


class Peers:
    """MPI, and torch's group and Horovod where they are available. Collective; use as a context manager."""

    def __init__(
        self, *, without_gloo: str | None = None, without_horovod: str | None = None, device: torch.device = _CPU
    ) -> None:
        """Start those that are there.

        Args:
            without_gloo: Why this run leaves torch's group out; None: it takes part if it can.
            without_horovod: The same for Horovod.
            device: Where the tensors are; decides over the backend of torch's group.
        """
        backend = backend_for(device)
        self.device = device
        self.raw = RawMpi()
        self.left_out: list[str] = []
        """One sentence for each that does not take part."""
        self.group: TorchGroup | None = None
        self.horovod: HorovodJob | None = None
        reason = without_gloo or torch_unavailable(backend)
        if reason is None:
            self.group = TorchGroup(backend)
        else:
            self.left_out.append(f"Without {backend}: {reason}.")
        started = without_horovod or start_horovod(device)
        if isinstance(started, HorovodJob):
            self.horovod = started
        else:
            self.left_out.append(f"Without Horovod: {started}.")

    def describe(self, benchmark: str) -> dict[str, Any]:
        """Return the conditions of the run, and who takes no part in it."""
        version = self.horovod.version if self.horovod else None
        conditions = describe(benchmark, self.raw) | describe_device(self.device)
        return {**conditions, "horovod": version, "left_out": self.left_out}

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the ranks no longer do the same: a rank that waits for another would wait in vain.
        if kind is not None:
            return
        if self.horovod is not None:
            self.horovod.close()
        if self.group is not None:
            self.group.close()
        self.raw.free()

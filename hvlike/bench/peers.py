"""Who is measured beside hvlike in this run: MPI, torch.distributed, and Horovod in a job of its own.

Rank 0 starts Horovod's job, with as many ranks, each on the cores of one of ours. While it runs, our ranks sleep; while
they run, its processes sleep.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import hvlike
from hvlike.bench import reducers
from hvlike.bench.harness.benchmark import describe
from hvlike.bench.harness.comparison import Ranks
from hvlike.bench.harness.processes import Conversation, Message, find, module_command
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import GLOO_BACKEND, HOROVOD, TorchGroup
from hvlike.errors import HvlikeError, LaunchError

# What belongs to our own job and must not reach another one.
_OURS = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
_START_SECONDS = 120.0
_LOOK_SECONDS = 0.2
_END_SECONDS = 20.0
_LAST_WORDS_SECONDS = 5.0
_ANSWER_SECONDS = 300.0
_LAST_CHARACTERS = 2000


def horovod_unavailable() -> str | None:
    """Why Horovod cannot take part, or None."""
    if importlib.util.find_spec("horovod") is None:
        return "not installed"
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its job here is on one"
    return None


def start() -> HorovodJob | str:
    """Start Horovod's job, or return why it does not start. Collective."""
    cores = hvlike.allgather_object(sorted(os.sched_getaffinity(0)), name="bench.horovod.cores")
    job, reason = None, None
    if hvlike.rank() == 0:
        try:
            job = _Job(cores)
        except (LaunchError, OSError) as error:
            reason = str(error)
    reason = hvlike.broadcast_object(reason, name="bench.horovod.started")
    return HorovodJob(job) if reason is None else str(reason)


class HorovodJob:
    """The other job as all ranks of ours see it. Every method is collective, and whoever waits in it sleeps."""

    def __init__(self, job: _Job | None) -> None:
        self._job = job
        self.version = str(hvlike.broadcast_object(job.version if job else None, name="bench.horovod.version"))

    def ask(self, request: Message) -> float:
        """Let all of Horovod's ranks do something; returns the seconds of the slowest, 0 where none are counted.

        Raises: HvlikeError on every rank when one of them fails.
        """
        seconds: float = 0.0
        failure: str | None = None
        if self._job is not None:
            try:
                seconds = self._job.ask(request)
            except HvlikeError as error:
                failure = str(error)
                # All of ours end now, and would take it with them in the middle of its work.
                self._job.close()
        seconds, failure = hvlike.broadcast_object((seconds, failure), name="bench.horovod.turn")
        if failure is not None:
            raise HvlikeError(failure)
        return seconds

    def close(self) -> None:
        """End the other job, if a failure has not. Local."""
        if self._job is not None:
            self._job.close()


@dataclass(frozen=True)
class HorovodEntrant:
    """What Horovod's job is doing, as an entrant of a comparison."""

    job: HorovodJob
    times: int = 1
    name: str = HOROVOD

    def turn(self, ranks: Ranks) -> float:
        """Let it do its work once. Collective. Returns the seconds of its slowest rank."""
        ranks.barrier()
        return self.job.ask({"times": self.times})

    def check(self) -> None:
        """Let it look at its results. Collective. Raises: HvlikeError."""
        self.job.ask({"check": True})


class _Job:
    """On rank 0: the launcher of the other job and a conversation with each of its ranks."""

    def __init__(self, cores: list[list[int]]) -> None:
        starter = find()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
        with tempfile.TemporaryDirectory(prefix="hvlike-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "socket")
            listener.bind(address)
            listener.listen(len(cores))
            listener.settimeout(_LOOK_SECONDS)
            # A file, not a pipe: nobody reads while it runs.
            self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
            self._process = subprocess.Popen(
                module_command(starter, len(cores), "hvlike.bench.horovod_rank", [address]),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            try:
                self._ranks = self._greet(listener, len(cores))
                self.ask_each([{"cores": each} for each in cores])
            except BaseException:
                self._process.terminate()
                self._output.close()
                raise

    def _greet(self, listener: socket.socket, count: int) -> list[Conversation]:
        greeted: dict[int, Conversation] = {}
        waited = 0.0
        while len(greeted) < count:
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                waited += _LOOK_SECONDS
                if self._process.poll() is not None or waited > _START_SECONDS:
                    raise self._failure("did not start") from None
                continue
            connected.settimeout(_ANSWER_SECONDS)
            conversation = Conversation(connected)
            hello = conversation.hear()
            if hello is None:
                raise self._failure("did not start")
            greeted[hello["rank"]] = conversation
            self.version = str(hello["version"])
        return [greeted[rank] for rank in range(count)]

    def ask(self, request: Message) -> float:
        """Send the same request to all; returns the most seconds. Raises: HvlikeError."""
        return self.ask_each([request] * len(self._ranks))

    def ask_each(self, requests: list[Message]) -> float:
        """Send one request to each and wait for all answers; returns the most seconds. Raises: HvlikeError."""
        try:
            for conversation, request in zip(self._ranks, requests, strict=True):
                conversation.say(request)
            answers = [conversation.hear() for conversation in self._ranks]
        except OSError as error:
            raise self._failure("does not answer") from error
        for rank, answer in enumerate(answers):
            if answer is None:
                raise self._failure("has ended early")
            if "error" in answer:
                raise HvlikeError(f"Horovod's job, rank {rank}: {answer['error']}")
        return max(float(answer.get("seconds", 0.0)) for answer in answers if answer is not None)

    def _failure(self, what: str) -> LaunchError:
        # A rank hangs up before its launcher has passed on what it printed last.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)
        self._output.seek(0)
        return LaunchError(f"Horovod's job {what}; its last output:\n{self._output.read()[-_LAST_CHARACTERS:]}")

    def close(self) -> None:
        """Hang up, upon which its ranks end."""
        for conversation in self._ranks:
            conversation.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._output.close()


class Peers:
    """MPI, and gloo and Horovod where they can be had. Collective; use as a context manager."""

    def __init__(
        self, *, without_gloo: str | None = None, without_horovod: str | None = None, backend: str = GLOO_BACKEND
    ) -> None:
        """without_...: why this run does without; None: take it if it is there. backend: torch's, in gloo's place."""
        self.raw = RawMpi()
        self.left_out: list[str] = []
        """One sentence for each that does not take part."""
        self.group: TorchGroup | None = None
        self.horovod: HorovodJob | None = None
        reason = without_gloo or reducers.torch_unavailable(backend)
        if reason is None:
            self.group = TorchGroup(backend)
        else:
            self.left_out.append(f"Without {backend}: {reason}.")
        reason = without_horovod or horovod_unavailable()
        started = reason or start()
        if isinstance(started, HorovodJob):
            self.horovod = started
        else:
            self.left_out.append(f"Without Horovod: {started}.")

    def describe(self, benchmark: str) -> dict[str, Any]:
        """Return the conditions of the run, and who takes no part in it."""
        version = self.horovod.version if self.horovod else None
        return {**describe(benchmark, self.raw), "horovod": version, "left_out": self.left_out}

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the ranks no longer do the same: whoever waits for another would wait in vain.
        if kind is not None:
            return
        if self.horovod is not None:
            self.horovod.close()
        if self.group is not None:
            self.group.close()
        self.raw.free()

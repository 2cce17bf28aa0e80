"""What bench rpc and bench autograd share: a session in which rank 0 measures, and TensorPipe's two processes.

TensorPipe polls: each of its processes keeps a core busy for as long as it runs. They are stopped (SIGSTOP) whenever
it is not their turn, and continued (SIGCONT) warm, with their connections as they are.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import rpc as torch_rpc

import hvlike
from hvlike import rpc
from hvlike.bench.harness.benchmark import describe_alone
from hvlike.bench.harness.processes import Helpers
from hvlike.bench.rpc_work import CALLEE, Work, as_message
from hvlike.errors import HvlikeError, LaunchError


class TensorPipePair:
    """The two processes as rank 0 of ours sees them. They are stopped between their turns."""

    def __init__(self, cores: Sequence[Sequence[int]]) -> None:
        """Start them, each on the cores of one of our ranks. Raises: LaunchError, OSError."""
        self._helpers = Helpers("torch.distributed.rpc")
        # They meet there again when they shut down.
        self._folder = tempfile.TemporaryDirectory(prefix="hvlike-bench-")
        try:
            for rank, each in enumerate(cores):
                self._start(rank, each)
            for end in self._helpers.sockets:
                self._helpers.receive(end)
        except BaseException:
            self._helpers.end()
            self._folder.cleanup()
            raise
        self._signal(signal.SIGSTOP)

    def _start(self, rank: int, cores: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._helpers.connect(ours)
        with theirs:
            arguments = [str(rank), str(Path(self._folder.name) / "meeting"), str(theirs.fileno())]
            command = [sys.executable, "-m", "hvlike.bench.rpc_peer", *arguments]
            process = self._helpers.start(command, pass_fds=[theirs.fileno()])
        os.sched_setaffinity(process.pid, cores)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._helpers.processes]

    def measure(self, work: Work) -> list[float]:
        """Have them do some work; returns what it has measured. Raises: HvlikeError."""
        self._signal(signal.SIGCONT)
        answer = self._helpers.ask(self._helpers.sockets[0], as_message(work))
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise HvlikeError(f"torch.distributed.rpc: {answer['error']}")
        samples: list[float] = answer["samples"]
        return samples

    def _signal(self, number: signal.Signals) -> None:
        for process in self._helpers.processes:
            process.send_signal(number)

    def close(self) -> None:
        """Hang up, upon which they shut down together and end."""
        self._signal(signal.SIGCONT)
        self._helpers.close()
        self._folder.cleanup()


_rank_0_is_done = threading.Event()


@dataclass(frozen=True)
class Setting:
    """Where the measurement runs."""

    conditions: dict[str, Any]
    cores: Sequence[Sequence[int]]
    """Of each rank."""


@contextmanager
def session(benchmark: str) -> Iterator[Setting]:
    """Start RPC, and end it and hvlike at the end. Collective; hvlike is initialised on two ranks."""
    conditions = describe_alone(benchmark)
    cores = hvlike.allgather_object(sorted(os.sched_getaffinity(0)), name="bench.cores")
    rpc.init_rpc(f"worker{hvlike.rank()}")
    yield Setting(conditions, cores)
    rpc.shutdown()
    hvlike.shutdown()


def wait_for_rank_0() -> None:
    """Sleep on rank 1 until rank 0 has done its calls. Collective."""
    if hvlike.rank() == 0:
        rpc.rpc_sync(CALLEE, _end)
    else:
        _rank_0_is_done.wait()
        _rank_0_is_done.clear()


def _end() -> None:
    _rank_0_is_done.set()


@contextmanager
def tensorpipe(cores: Sequence[Sequence[int]], without: str | None) -> Iterator[TensorPipePair | str]:
    """Start TensorPipe's processes on rank 0, or say why they take no part. without: the user's reason for that."""
    pair = _start(cores) if without is None else without
    try:
        yield pair
    finally:
        if isinstance(pair, TensorPipePair):
            pair.close()


def _start(cores: Sequence[Sequence[int]]) -> TensorPipePair | str:
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its processes here are on one"
    if not torch_rpc.is_available():
        return "this torch was built without it"
    try:
        return TensorPipePair(cores)
    except (LaunchError, OSError) as error:
        return str(error)

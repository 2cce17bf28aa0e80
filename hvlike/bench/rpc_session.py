"""What bench rpc and bench autograd share: a session in which rank 0 measures, and TensorPipe's two processes.

TensorPipe polls: each of its processes keeps a core busy for as long as it runs. They are stopped (SIGSTOP) whenever
it is not their turn, and continued (SIGCONT) warm, with their connections as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
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
from hvlike.bench.harness.processes import Conversation, Message
from hvlike.bench.rpc_work import CALLEE, Work, as_message
from hvlike.errors import HvlikeError, LaunchError

_ANSWER_SECONDS = 300.0
_END_SECONDS = 20.0
_LAST_CHARACTERS = 2000


class TensorPipePair:
    """The two processes, as rank 0 of ours sees them; between turns they are stopped."""

    def __init__(self, cores: Sequence[Sequence[int]]) -> None:
        """Start them, each on the cores of one of our ranks. Raises: LaunchError, OSError."""
        # A file, not a pipe: nobody reads while they run.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # They meet there again when they shut down.
        self._folder = tempfile.TemporaryDirectory(prefix="hvlike-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[Conversation] = []
        try:
            for rank, each in enumerate(cores):
                self._start(rank, each)
            for end in self._ends:
                self._hear(end)
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)

    def _start(self, rank: int, cores: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_SECONDS)
        with theirs:
            arguments = [str(rank), str(Path(self._folder.name) / "meeting"), str(theirs.fileno())]
            process = subprocess.Popen(
                [sys.executable, "-m", "hvlike.bench.rpc_peer", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._processes.append(process)
        self._ends.append(Conversation(ours))
        os.sched_setaffinity(process.pid, cores)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def measure(self, work: Work) -> list[float]:
        """Let them do some work; returns what it has measured. Raises: HvlikeError."""
        return self.ask(as_message(work))

    def ask(self, request: Message) -> list[float]:
        """The same for work as a message, of a kind that hvlike/bench/rpc_peer.py knows."""
        self._signal(signal.SIGCONT)
        caller = self._ends[0]
        try:
            caller.say(request)
            answer = self._hear(caller)
        except OSError as error:
            raise self._failure("do not answer") from error
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise HvlikeError(f"torch.distributed.rpc: {answer['error']}")
        samples: list[float] = answer["samples"]
        return samples

    def _hear(self, end: Conversation) -> Message:
        message = end.hear()
        if message is None:
            raise self._failure("have ended early")
        return message

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _failure(self, what: str) -> LaunchError:
        self._output.seek(0)
        last = self._output.read()[-_LAST_CHARACTERS:]
        return LaunchError(f"the processes of torch.distributed.rpc {what}; their last output:\n{last}")

    def close(self) -> None:
        """Hang up, upon which they shut down together and end."""
        self._signal(signal.SIGCONT)
        for end in self._ends:
            end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._output.close()
        self._folder.cleanup()


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
def tensorpipe(cores: Sequence[Sequence[int]], without: str | None) -> Iterator[TensorPipePair | str]:
    """TensorPipe's processes, or why they take no part. without: such a reason, from the user. On rank 0."""
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

"""torch.distributed.rpc over TensorPipe as a contestant: two processes of its own beside ours, on the same cores.

TensorPipe polls: each of its processes keeps a core busy for as long as it runs. They are stopped (SIGSTOP) whenever
it is not their turn, and go on where they were (SIGCONT): warm, with their connections as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvlike.bench.conversation import Conversation, Message
from hvlike.bench.rpc_work import Work, as_message
from hvlike.errors import HvlikeError, LaunchError

_ANSWER_SECONDS = 300.0
_END_SECONDS = 20.0
_LAST_CHARACTERS = 2000


class Pair:
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

"""A long-lived job that runs programs: started when it is needed, ended and started anew when it hangs or dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
from support.fuzz.outcomes import Failure, Outcome
from support.fuzz.programs import Program, Setting
from support.job import STARTUP, RunningJob, start_job

RANK = Path(__file__).with_name("rank.py")
# NCCL refuses ranks of one host that share a GPU.
OWN_HOST = ("bash", "-c", 'export NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK; exec "$@"', "rank")
START_SECONDS = 120.0
PROGRAM_SECONDS = 30.0
PEERS_SECONDS = 3.0
MOST_LINES = 20


class Lost(Exception):
    """The job has not answered, or has ended."""


class Job:
    """Ranks that wait for programs."""

    def __init__(self, ranks: int, hvlike: Path | None = None, *, compiles: bool = False, device: str = "") -> None:
        """hvlike: the folder of another one than this checkout's. compiles: programs use torch.compile. device: of all
        tensors; without one the CPU.
        """
        self.ranks = ranks
        self.compiles = compiles
        self._hvlike, self._device = hvlike, device
        self._running: RunningJob | None = None
        self._folder = ""
        self._pids: dict[int, int] = {}
        self._connections: list[Connection] = []
        self._setting: Setting | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def run(self, program: Program, setting: Setting) -> list[Any]:
        """Run a program on all ranks and return their outcomes, those of torch's wrappers with one over gloo each.

        A job that hangs or dies is ended, and its outcomes say so.
        """
        answers: dict[int, Any] = {}
        try:
            self._start(setting)
            self._ask(("run", program), PROGRAM_SECONDS, answers)
        except Lost as lost:
            for rank in range(self.ranks):
                lost_one = Outcome(failure=Failure(-1, "Lost", f"{lost}\n{self._stack(rank)}"))
                answers.setdefault(rank, (lost_one, lost_one) if program.runs_twice else lost_one)
            self.end()
        outcomes = [answers[rank] for rank in range(self.ranks)]
        ends = [end for each in outcomes for end in (each if program.runs_twice else [each])]
        if any(end.failure is not None for end in ends):
            # What an error leaves behind is not the next program's affair.
            self._setting = None
        return outcomes

    def end(self) -> None:
        """End the job."""
        running, self._running = self._running, None
        for connection in self._connections:
            connection.close()
        if running is not None:
            running.__exit__()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._connections, self._setting = [], None

    def _start(self, setting: Setting) -> None:
        if self._running is None:
            self._folder = tempfile.mkdtemp(prefix="hvlike-fuzz-")
            address = f"{self._folder}/driver"
            environment = {"HVLIKE_TEST_NOTHING_LATE": "1"} if self.compiles or self._device else {}
            environment |= {} if self._hvlike is None else {"PYTHONPATH": f"{self._hvlike}{os.pathsep}{STARTUP}"}
            with Listener(address, family="AF_UNIX", backlog=self.ranks) as listener:
                arguments = [address, self._device] if self._device else [address]
                between = OWN_HOST if self._device and torch.cuda.device_count() < self.ranks else ()
                self._running = start_job(RANK, self.ranks, args=arguments, env=environment, between=between)
                self._accept(listener)
        if self._setting != setting:
            self._ask(("start", setting.knobs), START_SECONDS, {})
            self._setting = setting

    def _accept(self, listener: Listener) -> None:
        # Listener has no timeout of its own.
        inner = vars(listener)["_listener"]
        vars(inner)["_socket"].settimeout(START_SECONDS)
        places: dict[int, Connection] = {}
        try:
            for _ in range(self.ranks):
                connection = listener.accept()
                rank, self._pids[rank] = connection.recv()
                places[rank] = connection
        except (OSError, EOFError) as error:
            raise Lost(f"the job has not started: {error}") from error
        self._connections = [places[rank] for rank in range(self.ranks)]

    def _ask(self, message: Any, seconds: float, answers: dict[int, Any]) -> None:
        """Send a message to all ranks, and take their answers."""
        try:
            for connection in self._connections:
                connection.send(message)
            end = time.monotonic() + seconds
            while len(answers) < self.ranks:
                left = {each: rank for rank, each in enumerate(self._connections) if rank not in answers}
                ready = wait(list(left), max(0.0, end - time.monotonic()))
                if not ready:
                    raise Lost("no answer: it hangs")
                for each in ready:
                    answer = answers[left[each]] = each.recv()  # type: ignore[index, union-attr]
                    if isinstance(answer, Outcome) and answer.failure is not None:
                        # The others fail soon too, or never.
                        end = min(end, time.monotonic() + PEERS_SECONDS)
        except (EOFError, OSError) as error:
            raise Lost(f"the job has ended: {type(error).__name__}\n{self._errors()}") from error

    def _stack(self, rank: int) -> str:
        """Return where a rank is."""
        path = Path(f"{self._folder}/stack-{rank}")
        with contextlib.suppress(OSError, KeyError):
            os.kill(self._pids[rank], signal.SIGUSR2)
            time.sleep(0.5)
            return "".join(path.read_text().splitlines(keepends=True)[:MOST_LINES])
        return ""

    def _errors(self) -> str:
        return "" if self._running is None else self._running.errors()[-3000:]

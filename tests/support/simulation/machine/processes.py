"""The processes of a simulated job: one for each rank, and the launcher, which ends them all when one fails.

    program returns or raises --> hooks of the guard --> exit handlers, the last one first --> MPI_Finalize --> gone
    killed --------------------------------------------------------------------------------------------------> gone
                                                        Abort, or a loss that the launcher sees --> all are gone

Of a process that is gone no thread goes on, and nobody hears of it but by what the system says: `kill` finds no such
process, its memory cannot be read, and MPI may know.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from support.simulation.machine.scheduler import Scheduler
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.simulated_thread import JobEnded

FIRST_PROCESS = 1 << 30  # No process of the system has such a number


class Processes:
    """See the head of this file."""

    def __init__(self, scheduler: Scheduler, mpi: SimulatedMpi, node_of: Mapping[int, int], *, outlives: bool) -> None:
        """outlives: the job goes on when a rank is lost, as under `mpirun --with-ft ulfm`."""
        self.gone: dict[int, float] = {}  # Ranks, and when their processes have ended
        self.killed: set[int] = set()
        self.aborted: tuple[int, int] | None = None  # Who has called Abort first, and with which status
        self.launcher_seconds = math.inf
        """How long after a loss the launcher ends the other ranks."""
        self.start_thread: Callable[[Callable[[], None]], object] = bool
        """Starts a thread that belongs to no rank."""
        self.scheduler, self._mpi, self._node_of, self._outlives = scheduler, mpi, node_of, outlives
        self._handlers: dict[int, list[tuple[Any, tuple[Any, ...]]]] = {rank: [] for rank in node_of}
        self._holders: dict[int, FirstReport] = {}

    # -- what stands for the system -------------------------------------------------------------------

    def process(self) -> int:
        """os.getpid."""
        return FIRST_PROCESS + self.scheduler.rank

    def kill(self, process: int, number: int) -> None:
        """os.kill."""
        rank = process - FIRST_PROCESS
        if rank in self.gone:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        if number == signal.SIGKILL:
            self.lose(rank)

    def status(self, process: int) -> dict[str, str]:
        """What /proc says."""
        rank = process - FIRST_PROCESS
        if rank in self.gone:
            return {}
        stopped = any(each.rank == rank and each.held_until > self.scheduler.now for each in self.scheduler.threads)
        return {"State": "T (stopped)" if stopped else "S (sleeping)", "SigCgt": "0"}

    def at_exit(self, function: Any, *arguments: Any) -> Any:
        """atexit.register."""
        self._handlers[self.scheduler.rank].append((function, arguments))
        return function

    def not_at_exit(self, function: Any) -> None:
        """atexit.unregister."""
        handlers = self._handlers[self.scheduler.rank]
        handlers[:] = [each for each in handlers if each[0] != function]

    def exit_now(self, status: int) -> NoReturn:
        """os._exit."""
        self._check()
        self.lose(self.scheduler.rank)
        raise JobEnded

    def access(self, function: Any) -> Any:
        """process_vm_readv or process_vm_writev: all memory is that of this process."""

        def call(process: int, *arguments: Any) -> Any:
            if process - FIRST_PROCESS in self.gone:
                ctypes.set_errno(errno.ESRCH)
                return -1
            return function(os.getpid(), *arguments)

        return call

    def first_report(self) -> FirstReport:
        """hvlike.transport.failure.first_report.FirstReport."""
        rank = self.scheduler.rank
        return FirstReport(self, self._holders, self._node_of[rank], rank)

    # -- ends -------------------------------------------------------------------------------------------

    def lose(self, rank: int) -> None:
        """A process is killed, or exits without a word."""
        if rank in self.gone:
            return
        self.killed.add(rank)
        self._mpi.lose(rank)
        if not self._outlives and self.launcher_seconds < math.inf and len(self.killed) == 1:
            self.start_thread(self._launch_end)
        self._end(rank)

    def abort(self, rank: int, status: int) -> None:
        """MPI_Abort."""
        self._check()
        self.end_all(rank, status)

    def end_all(self, rank: int, status: int) -> None:
        """The launcher kills all processes."""
        if self.aborted is None:
            self.aborted = rank, status
        others = [each for each in self._handlers if each != self.scheduler.rank]
        for each in [*others, self.scheduler.rank]:
            if each in self._handlers and each not in self.gone:
                self._mpi.lose(each)
                self._end(each)

    def run(self, rank: int, program: Callable[[], None], guard: Callable[[], Any]) -> None:
        """All that the main thread of a process does. guard: the one that watches, if any; program: must not catch the
        end of the process.
        """
        try:
            program()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if guard() is not None:
                guard().on_sys_exit(status)
            self._exit(rank, status)
        except Exception:
            if guard() is not None:
                guard().on_exception(*sys.exc_info())
            self._exit(rank, 1)
        else:
            self._exit(rank, 0)

    def _exit(self, rank: int, status: int) -> None:
        handlers = self._handlers[rank]
        while handlers:
            function, arguments = handlers.pop()
            function(*arguments)
        self._mpi.module(rank).Finalize()
        if status:
            self.end_all(rank, status)
        self._end(rank)

    def _launch_end(self) -> None:
        self.scheduler.sleep(self.launcher_seconds)
        self.end_all(-1, 137)

    def _end(self, rank: int) -> None:
        self.gone[rank] = self.scheduler.now
        self.scheduler.change()
        self.scheduler.touch(self)
        self.scheduler.lose(rank)

    def _check(self) -> None:
        """A thread that unwinds after the end ends nothing."""
        if self.scheduler.current is None or self.scheduler.current.is_over:
            raise JobEnded


class FirstReport:
    """hvlike.transport.failure.first_report.FirstReport: of the processes of a node the first one that claims it."""

    def __init__(self, processes: Processes, holders: dict[int, FirstReport], node: int, rank: int) -> None:
        self._processes, self._holders, self._node, self.rank = processes, holders, node, rank
        self.told: list[tuple[int, str]] = []

    @property
    def _holder(self) -> FirstReport | None:
        holder = self._holders.get(self._node)
        return None if holder is None or holder.rank in self._processes.gone else holder

    @property
    def is_held(self) -> bool:
        """Whether this process has the right."""
        return self._holder is self

    def claim(self, rank: int, summary: str) -> bool:
        """Take it, or tell who has it."""
        holder = self._holder
        if holder is None:
            self._holders[self._node] = self
        elif holder is not self:
            holder.told.append((rank, summary))
        return holder in (None, self)

    def others(self) -> list[tuple[int, str]]:
        """Who has told this process, so far."""
        told, self.told = self.told, []
        return told

    def release(self) -> None:
        """Give it back."""
        if self.is_held:
            del self._holders[self._node]
            self._processes.scheduler.change()
            self._processes.scheduler.touch(self._processes)

    def wait_for_holder(self, deadline: float) -> None:
        """Sleep while another one has it."""
        self._processes.scheduler.block(
            lambda: self._holder in (None, self), deadline, "waits for the rank that reports", self._processes
        )

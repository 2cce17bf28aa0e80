"""Ranks that do not answer: whether their processes exist, what they are doing, and who waits in init().

`Liveness` notices processes of this node that are gone. `request_stacks` makes a stuck rank print its stacks: a
signal has Python's faulthandler write them to the rank's own stderr, which needs no lock and so works while a C call
holds Python's. The signal is a real-time one that nothing uses by convention, and goes only to a process that handles
it. `init_watchdog` warns while this rank waits for others in init(), and ends the job when that takes too long.
`start_watchdog` ends a job under fault tolerance when a process is lost before MPI has started.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hvlike.observe.log import main_stack
from hvlike.observe.printing import descriptor_of_stderr, report
from hvlike.system.system import system
from hvlike.transport.failure.fault_tolerance import abort_job
from hvlike.transport.host import launchers
from hvlike.transport.host.launcher_table import PROCESSES
from hvlike.transport.host.parents import LauncherWatch, environment_of


class Liveness:
    """Watches the processes of the local ranks; those in another PID namespace cannot be seen and are not watched."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = {rank: process for rank, process in processes.items() if _exists(process)}

    def lost(self) -> list[int]:
        """The ranks whose process has gone since the last call, each reported once."""
        lost = [rank for rank, process in self._processes.items() if not _exists(process)]
        for rank in lost:
            del self._processes[rank]
        return lost


def _exists(process: int) -> bool:
    try:
        system.kill(process, 0)
    except OSError as error:
        # Of a process of another user it is a PermissionError.
        return not isinstance(error, ProcessLookupError)
    return True


STACK_SIGNAL = signal.SIGRTMAX - 5


def answer_stack_signal() -> bool:
    """Answer the signal from now on; False where the program handles it itself or there is no stderr."""
    stderr = descriptor_of_stderr()
    if stderr is None or signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return False
    faulthandler.register(STACK_SIGNAL, stderr)
    return True


def ignore_stack_signal() -> None:
    faulthandler.unregister(STACK_SIGNAL)


def request_stacks(process: int) -> str:
    """Make a process of this node print its stacks; returns a sentence about it for the report."""
    status = process_status(process)
    # Ranks of one machine in several PID namespaces do not see each other's processes.
    if not status:
        return f"process {process} cannot be seen from here"
    if status["State"].startswith(("T", "t")):
        return "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    if int(status["SigCgt"], 16) >> (STACK_SIGNAL - 1) & 1:
        system.kill(process, STACK_SIGNAL)
        return f"it prints its stacks to stderr: process {process}, all threads"
    return f"process {process} cannot be asked for its stack"


def process_status(process: int) -> dict[str, str]:
    return system.process_status(process)


logger = logging.getLogger("hvlike")


@contextmanager
def _beside(watch: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run `watch` in a thread of that name; it ends when the event is set that it gets, at the end of the body."""
    done = system.Event()
    thread = system.Thread(target=watch, args=[done], name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def init_watchdog(patience: float, limit: float, give_up: Callable[[str, str], None]) -> AbstractContextManager[None]:
    """Warn every `patience` seconds of the body, a part of init(); `give_up(text, summary)` after `limit`, if not 0."""
    started = system.monotonic()

    def watch(done: threading.Event) -> None:
        due = patience
        while not done.wait(max(0.0, started + (min(due, limit) if limit else due) - system.monotonic())):
            waited = system.monotonic() - started
            text = (
                f"{_me()} has waited {waited:.0f} s in init() for other ranks: every rank of the communicator must "
                "call init(), with the same comm argument. Look for a rank that is still busy or has not called it."
            )
            if limit and waited >= limit:
                summary = f"StalledError: init() took more than {limit:g} s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS)"
                give_up(f"hvlike: {text}\n{main_stack()}\n{summary}", summary)
                return
            logger.warning("%s", text)
            due += patience

    return _beside(watch, "hvlike-init")


def _me() -> str:
    """This rank as the launcher numbers it: MPI may not have started."""
    launcher = launchers.detect_launcher(os.environ)
    rank = "a rank" if launcher is None or launcher.rank is None else f"rank {launcher.rank} of {launcher.size}"
    return f"{rank} on {socket.gethostname()}"


_SCAN_SECONDS, _LONGEST_SCAN_SECONDS = 0.5, 4.0  # All ranks of a node look through all of its processes


def start_watchdog(environ: Mapping[str, str]) -> AbstractContextManager[None]:
    """End the job when a process of this node is gone during the body, MPI_Init, which would wait for it for ever:
    under fault tolerance the launcher does not end a job for that. Does nothing where the processes cannot be seen.
    """
    launcher = _find_daemon()

    def watch(done: threading.Event) -> None:
        incomplete, pause = False, _SCAN_SECONDS
        while not done.wait(pause):
            pause = min(2 * pause, _LONGEST_SCAN_SECONDS)
            before, living = incomplete, _living_ranks(environ, launcher)
            incomplete = len(living) < int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
            # Twice: a process that is just being started has not its own environment yet.
            if incomplete and before and not done.is_set():
                _end_job_before_mpi(environ, living)

    return _beside(watch, "hvlike-start") if launcher else nullcontext()


def _find_daemon() -> int:
    """The process of the launcher that has started this rank, 0 if it cannot be seen."""
    launcher = LauncherWatch().launcher
    return launcher if process_status(launcher).get("Name") in PROCESSES else 0


def _rank_in(process: int, environ: Mapping[str, str]) -> int | None:
    """The rank of a process, or of the one that has started it; None if it is not of this job."""
    found = environment_of(process)
    here = found.get("PMIX_NAMESPACE", "") == environ.get("PMIX_NAMESPACE")
    return int(found["PMIX_RANK"]) if here and found.get("PMIX_RANK", "").isdecimal() else None


def _living_ranks(environ: Mapping[str, str], launcher: int) -> set[int]:
    """The ranks whose process the launcher has on this node."""
    processes = [int(each) for each in os.listdir("/proc") if each.isdecimal()]
    children = [each for each in processes if process_status(each).get("PPid") == str(launcher)]
    return {rank for each in children if (rank := _rank_in(each, environ)) is not None}


def _end_job_before_mpi(environ: Mapping[str, str], living: set[int]) -> None:
    rank, size, here = (int(environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_SIZE"))
    missing = sorted(set(range(size)) - living)
    who = f"rank {', '.join(map(str, missing))} of {size}" if here == size else f"{here - len(living)} of {here} ranks"
    if rank == min(living, default=rank):
        text = (
            f"hvlike: {who} on {socket.gethostname()} ended before MPI had started. Every rank waits for it in "
            "MPI_Init, and a rank cannot be made up for before hvlike.elastic.run: this ends the job. If it failed by "
            "itself, its error is above."
        )
        report(text)
        # The launcher calls the job a success when its only process asks for an abort.
        if len(living) > 1 or here < size:
            abort_job(1, "a rank ended before MPI had started")
    # Where PMIx cannot be asked, all ranks of this node end like this; else the launcher is faster.
    time.sleep(_SCAN_SECONDS)
    os._exit(1)

"""Ranks that do not answer: whether their processes exist, what they are doing, and who waits in init().

`Liveness` notices processes of this node that are gone. `request_stacks` makes a stuck rank print its stacks: a
signal has Python's faulthandler write them to the rank's own stderr, which needs no lock and so works while a C call
holds Python's. The signal is a real-time one that nothing uses by convention, and goes only to a process that handles
it. `init_watchdog` warns while this rank waits for others in init(), and ends the job when that takes too long.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvlike.observe.stacks import main_stack
from hvlike.transport.host import launchers


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
        os.kill(process, 0)
    except OSError as error:
        # Of a process of another user it is a PermissionError.
        return not isinstance(error, ProcessLookupError)
    return True


STACK_SIGNAL = signal.SIGRTMAX - 5


def answer_stack_signal() -> bool:
    """Answer the signal from now on; False where the program handles it itself or there is no stderr."""
    if sys.__stderr__ is None or signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return False
    faulthandler.register(STACK_SIGNAL, sys.__stderr__)
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
        os.kill(process, STACK_SIGNAL)
        return f"it prints its stacks to stderr: process {process}, all threads"
    return f"process {process} cannot be asked for its stack"


def process_status(process: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


logger = logging.getLogger("hvlike")


@contextmanager
def init_watchdog(patience: float, limit: float, give_up: Callable[[str, str], None]) -> Iterator[None]:
    """Warn every `patience` seconds of the body, a part of init(); `give_up(text, summary)` after `limit`, if not 0."""
    done = threading.Event()
    started = time.monotonic()

    def watch() -> None:
        due = patience
        while not done.wait(max(0.0, started + (min(due, limit) if limit else due) - time.monotonic())):
            waited = time.monotonic() - started
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

    thread = threading.Thread(target=watch, name="hvlike-init", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _me() -> str:
    """This rank as the launcher numbers it: MPI may not have started."""
    launcher = launchers.detect_launcher(os.environ)
    rank = "a rank" if launcher is None or launcher.rank is None else f"rank {launcher.rank} of {launcher.size}"
    return f"{rank} on {socket.gethostname()}"

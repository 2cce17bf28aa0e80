"""The stack of a rank of this node that does not answer, because a call into C holds Python's lock, say.

A signal makes Python's faulthandler write the stacks of all threads to the rank's own stderr; it needs no lock. The
signal is a real-time one that nobody uses by convention, and is sent only to a process that handles it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

NUMBER = signal.SIGRTMAX - 5


def listen() -> bool:
    """Have the signal answered from now on; False where somebody else handles it or there is no stderr."""
    if sys.__stderr__ is None or signal.getsignal(NUMBER) is not signal.SIG_DFL:
        return False
    faulthandler.register(NUMBER, sys.__stderr__)
    return True


def stop() -> None:
    """Have the signal answered no more."""
    faulthandler.unregister(NUMBER)


def ask(process: int) -> str:
    """Make a process of this node print its stacks; what is to be said of it, for the report."""
    status = _status(process)
    # Ranks of one machine in several PID namespaces do not see each other's processes.
    if not status:
        return f"process {process} cannot be seen from here"
    if status["State"].startswith(("T", "t")):
        return "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    if int(status["SigCgt"], 16) >> (NUMBER - 1) & 1:
        os.kill(process, NUMBER)
        return f"it prints its stacks to stderr: process {process}, all threads"
    return f"process {process} cannot be asked for its stack"


def _status(process: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

"""What a rank says while it waits in init(), and how the job ends when that takes too long."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvlike.observe.stacks import main_stack
from hvlike.transport import launchers

logger = logging.getLogger("hvlike")


@contextmanager
def impatience(patience: float, limit: float, give_up: Callable[[str, str], None]) -> Iterator[None]:
    """While the body, a part of init(), runs: say every `patience` seconds that this rank waits.

    limit: seconds after which `give_up(text, summary)` is called, on another thread; 0: never.
    """
    done = threading.Event()
    started = time.monotonic()

    def complain() -> None:
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

    thread = threading.Thread(target=complain, name="hvlike-init", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _me() -> str:
    """This rank, as the launcher has it: MPI may be what it waits for."""
    launcher = launchers.detect(os.environ)
    rank = "a rank" if launcher is None or launcher.rank is None else f"rank {launcher.rank} of {launcher.size}"
    return f"{rank} on {socket.gethostname()}"

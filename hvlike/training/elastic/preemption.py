"""Preemption: a job that is asked to end does so at a boundary where all ranks agree.

Batch systems ask by a signal some time before they kill: SIGTERM, or what one has them send (SIGUSR1). It reaches one
process or all, at any moment. A handler notes it, the ranks compare notes in `state.commit()` or `preempted()`, and all
of them learn of it at the same place. `python -m hvlike launch` asks by a file, which all launchers let through.

    SIGTERM or SIGUSR1 to a rank --+
    SIGUSR1 to Open MPI's mpirun --+--> noted --> agreed at the next commit --> durable checkpoint --> exit status 75
    SIGTERM, SIGUSR1 to `launch` --+
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import torch

from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.reduction import Max
from hvlike.collectives.session.context import current
from hvlike.transport.failure.exit_status import EXIT_PREEMPTED, PREEMPTED, record_of_this_job

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

logger = logging.getLogger("hvlike")


class Preempted(SystemExit):
    """Ends the program with status 75: the job was asked to end, and all ranks do so at the same commit."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class _Handlers:
    """The signal handlers of this process, and whether one was called."""

    asked = False

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._owner = 0

    def install(self) -> bool:
        """Note signals from now on; False where that is done already or cannot be: in a thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return False
        self._owner = os.getpid()
        self._previous = {each: signal.signal(each, self._note) for each in SIGNALS}
        return True

    def put_back(self) -> None:
        """Let signals do what they did before, and forget those that came."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                # One that was not set from Python is None, and cannot be set again.
                if signal.getsignal(number) == self._note and handler is not None:
                    signal.signal(number, handler)
            self._previous = {}
            self.asked = False

    def _note(self, number: int, frame: Any) -> None:
        # Forked children inherit this handler, and Open MPI's mpirun passes signals on to them, too.
        if os.getpid() == self._owner:
            self.asked = True
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)


HANDLERS = _Handlers()


def is_asked() -> bool:
    """Whether this rank knows that the job is to end. Local."""
    record = record_of_this_job()
    # One rank looks: the file may be on a disk of the network.
    return HANDLERS.asked or (record is not None and current().world.rank == 0 and record.is_asked())


def agree(also: int = 0) -> tuple[bool, int]:
    """Whether any rank knows that the job is to end, and the highest `also` of all. Collective; blocks as a barrier."""
    notes = torch.tensor([int(is_asked()), also], device="cpu")
    asked, most = allreduce(notes, name="hvlike.elastic.agree", op=Max).tolist()
    return bool(asked), most


def say_preempted() -> None:
    """Tell the log, and whoever has started the job, that it ends because it was asked to. Local; all ranks call it."""
    record = record_of_this_job()
    if current().world.rank == 0:
        logger.warning("the job was asked to end; it ends here, with status %d", EXIT_PREEMPTED)
        if record is not None:
            record.write(PREEMPTED)


def preempted() -> bool:
    """Return whether the job was asked to end, by a signal to any rank: SIGTERM, SIGUSR1.

    For loops of one's own; `state.commit()` looks itself. Where it returns True, save what is needed, then
    `hvd.shutdown()` and `sys.exit(hvd.elastic.EXIT_PREEMPTED)`. From the first call until shutdown() the signals do not
    end the process any more; a handler that the program had is still called.
    Collective: every rank, at the same place; the first call on the main thread. Blocks until all have called. Costs a
    small allreduce.

    Returns:
        The same on every rank.

    Raises:
        HorovodInternalError: A rank has failed.

    Example:
        for step in range(first, steps):
            train_one(step)
            if hvd.elastic.preempted():
                hvd.checkpoint.save("checkpoints", step, model=model, optimizer=optimizer)
                hvd.shutdown()
                sys.exit(hvd.elastic.EXIT_PREEMPTED)
    """
    if HANDLERS.install():
        current().before_close.append(HANDLERS.put_back)
    asked, _ = agree()
    if asked:
        say_preempted()
    return asked

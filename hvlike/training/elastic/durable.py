"""Durable commits, and preemption: what a job leaves on the disk, and its end at a commit where all ranks agree.

With a checkpoint folder, commits of an elastic state are written to it, and training starts there:

    elastic.run --> load() --> func --> commit() --+-- not due ------------------------> func goes on
                                ^                  +-- long since the last --> write() --> func goes on
                                |                  +-- asked to end --> write() --> Preempted: status 75
                                +-- after an error, from the commit in memory

A file has the parts of the state by name (checkpoint.py says how each is saved), and the number of the commit.

Batch systems ask a job to end by a signal some time before they kill: SIGTERM, or what one has them send (SIGUSR1). It
reaches one process or all, at any moment. A handler notes it, the ranks compare notes in `state.commit()` or
`preempted()`, and all of them learn of it at the same place. `python -m hvlike launch` asks by a file, which all
launchers let through.

    SIGTERM or SIGUSR1 to a rank --+
    SIGUSR1 to Open MPI's mpirun --+--> noted --> agreed at the next commit --> durable checkpoint --> exit status 75
    SIGTERM, SIGUSR1 to `launch` --+
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.reduction import Max
from hvlike.collectives.session.basics import is_initialized, rank, shutdown
from hvlike.collectives.session.context import current
from hvlike.errors import CheckpointError, HorovodInternalError, HostsUpdatedInterrupt
from hvlike.system.system import system
from hvlike.training.elastic.checkpoint import check_values, is_stateful, load_all, save_all
from hvlike.training.elastic.state import ObjectState, State
from hvlike.transport.failure.exit_status import EXIT_PREEMPTED, PREEMPTED, record_of_this_job

logger = logging.getLogger("hvlike")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """Ends the program with status 75: the job was asked to end, and all ranks do so at the same commit."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class _SignalHandlers:
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


HANDLERS = _SignalHandlers()


def agree(also: int = 0) -> tuple[bool, int]:
    """Whether any rank knows that the job is to end, and the highest `also` of all. Collective; blocks as a barrier."""
    record = record_of_this_job()
    # One rank looks: the file may be on a disk of the network.
    asked = HANDLERS.asked or (record is not None and current().world.rank == 0 and record.is_asked())
    notes = torch.tensor([int(asked), also], device="cpu")
    any_asked, most = allreduce(notes, name="hvlike.elastic.agree", op=Max).tolist()
    return bool(any_asked), most


def say_preempted() -> None:
    """Tell the log, and whoever has started the job, that it ends because it was asked to. Local; all ranks call it."""
    record = record_of_this_job()
    if current().world.rank == 0:
        logger.warning("the job was asked to end; it ends here, with status %d", EXIT_PREEMPTED)
        if record is not None:
            record.write(PREEMPTED)


def preempted() -> bool:
    """Return whether the job was asked to end, by a signal to any rank: SIGTERM, SIGUSR1.

    For loops without elastic.run; `state.commit()` checks this itself. Where it returns True, save what is needed, then
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


class DurableCommits:
    """The commits of one state that outlive the job."""

    def __init__(self, state: ObjectState, folder: str, seconds: float) -> None:
        """seconds: how long after a write the next one is due."""
        self._state = state
        self._folder = folder
        self._seconds = seconds
        self._ends = self._due = False
        self._written = 0
        self._written_at = system.monotonic()

    def load(self) -> None:
        """Go to the newest whole checkpoint, if there is one, before the first commit. Collective; blocks."""
        if not self._state.commits and self.read("elastic.run starts", logging.INFO):
            self._state.save()
        self._written_at = system.monotonic()

    def read(self, what: str, level: int = logging.WARNING) -> bool:
        """Load the newest whole checkpoint, and say so in the log; False if there is none. Collective; blocks."""
        contents = self._state.contents()
        check_values(contents)
        loaded = load_all(self._folder, {name: value for name, value in contents.items() if is_stateful(value)})
        if loaded is None:
            return False
        for name, value in loaded.values.items():
            if name in contents:
                setattr(self._state, name, value)
        self._state.commits = self._written = loaded.step
        if rank() == 0:
            logger.log(level, "%s from commit %d: %s", what, loaded.step, loaded.path)
        return True

    def agree(self) -> None:
        """Agree, before a commit, whether it is to be written, and whether it is the last. Collective, as a barrier."""
        due = rank() == 0 and system.monotonic() - self._written_at >= self._seconds
        self._ends, most = agree(int(due))
        self._due = self._ends or bool(most)

    def after_commit(self) -> None:
        """Write the commit if that was agreed. Collective; blocks. Raises: Preempted, if it is the last."""
        if self._due:
            self.write()
        if self._ends:
            raise Preempted

    def finish(self) -> None:
        """Write what the training has ended with, unless that is done. Collective; blocks."""
        if is_initialized():
            # A spare that has taken over has written nothing.
            _, behind = agree(int(self._state.commits > self._written and rank() == 0))
            if behind:
                self.write()

    def write(self) -> None:
        """Write the state as it is. A disk that is full does not end the job. Collective; blocks."""
        try:
            save_all(self._folder, self._state.commits, self._state.contents())
            self._written = self._state.commits
        except CheckpointError as error:
            if rank() == 0:
                logger.warning("commit %d is not durable: %s", self._state.commits, error)
        self._written_at = system.monotonic()


def prepare(state: State) -> None:
    """Let the state have durable commits, if there is a folder. Local; on spares, too, before they are needed."""
    knobs = current().knobs
    if knobs.checkpoint_dir is not None and isinstance(state, ObjectState) and state.durable is None:
        state.durable = DurableCommits(state, knobs.checkpoint_dir, knobs.checkpoint_seconds)


def kept(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what elastic.run calls in place of the training function: with durable commits, if there is a folder."""
    installed = False

    @wraps(func)
    def attempt(state: State, *args: Any, **kwargs: Any) -> Any:
        nonlocal installed
        if state.durable is None:
            return func(state, *args, **kwargs)
        installed = HANDLERS.install() or installed
        again = False
        try:
            state.durable.load()
            result = func(state, *args, **kwargs)
            state.durable.finish()
        except (HorovodInternalError, HostsUpdatedInterrupt):
            # Another attempt follows: no moment without handlers.
            again = True
            raise
        except Preempted as end:
            # Returned as a result: elastic.run makes sure that all ranks, and spares, end.
            result, again = end, True
        finally:
            if installed and not again:
                HANDLERS.put_back()
                installed = False
        return result

    return attempt


def ended(result: Any) -> Any:
    """Return what training has returned. Raises: Preempted, if it has ended because the job is to; collective then."""
    if isinstance(result, Preempted):
        say_preempted()
        shutdown()
        HANDLERS.put_back()
        raise result
    return result

"""Durable commits: with a checkpoint folder, commits of an elastic state are written to it, and training starts there.

    elastic.run --> load() --> func --> commit() --+-- not due ------------------------> func goes on
                                ^                  +-- long since the last --> write() --> func goes on
                                |                  +-- asked to end --> write() --> Preempted: status 75
                                +-- after an error, from the commit in memory

A file has the parts of the state by name (checkpoint.py says how each is saved), and the number of the commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from hvlike.collectives.session.basics import is_initialized, rank, shutdown
from hvlike.collectives.session.context import current
from hvlike.errors import CheckpointError, HorovodInternalError, HostsUpdatedInterrupt
from hvlike.training.elastic.checkpoint import check_values, is_stateful, load_all, save_all
from hvlike.training.elastic.preemption import HANDLERS, Preempted, agree, say_preempted
from hvlike.training.elastic.state import ObjectState, State

logger = logging.getLogger("hvlike")


class DurableCommits:
    """The commits of one state that outlive the job."""

    def __init__(self, state: ObjectState, folder: str, seconds: float) -> None:
        """seconds: how long after a write the next one is due."""
        self._state = state
        self._folder = folder
        self._seconds = seconds
        self._ends = self._due = False
        self._written = 0
        self._written_at = time.monotonic()

    def load(self) -> None:
        """Go to the newest whole checkpoint, if there is one, before the first commit. Collective; blocks."""
        if not self._state.commits and self.read("elastic.run starts"):
            self._state.save()
        self._written_at = time.monotonic()

    def read(self, what: str) -> bool:
        """Load the newest whole checkpoint, and say so; False if there is none. Collective; blocks."""
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
            logger.warning("%s from commit %d: %s", what, loaded.step, loaded.path)
        return True

    def agree(self) -> None:
        """Agree, before a commit, whether it is to be written, and whether it is the last. Collective, as a barrier."""
        due = rank() == 0 and time.monotonic() - self._written_at >= self._seconds
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
        self._written_at = time.monotonic()


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

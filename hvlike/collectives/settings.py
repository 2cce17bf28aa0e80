"""The knobs of a job: every rank reads its own, and all ranks go on with them or none does."""

from __future__ import annotations

import logging
import os
from typing import Any

from hvlike.config import DYNAMIC, Knobs, differing, read_knobs
from hvlike.errors import UsageError
from hvlike.observe.log import set_up_log
from hvlike.observe.trace_file import check_writable
from hvlike.transport import launchers
from hvlike.transport.cores import available
from hvlike.transport.fabric import Fabric
from hvlike.transport.keep_memory import keep_memory
from hvlike.transport.world import World

logger = logging.getLogger("hvlike")


class Settings:
    """The knobs of this rank, and what is wrong with them."""

    def __init__(self) -> None:
        """Read the environment. Local; a wrong value is kept for `check`, so that no rank is left waiting in init()."""
        self.knobs = Knobs()
        self._wrong = ""
        try:
            self.knobs = read_knobs(os.environ)
        except UsageError as error:
            self._wrong = str(error)

    def check(self, comm: Any) -> None:
        """Compare with the other ranks, and see whether the files can be written.

        comm: all ranks. Collective and blocking.
        Raises: UsageError, on every rank, for a value that is wrong on one of them or that differs.
        """
        self._wrong = self._wrong or self._unwritable(comm.Get_rank())
        answers = comm.allgather((self._wrong, self.knobs))
        wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if not wrong:
            difference = differing([knobs for _, knobs in answers])
            wrong = [difference] if difference else []
        if wrong:
            raise UsageError(f"Horovod initialization failed: {'; '.join(wrong)}")

    def misplaced(self, world: World) -> str:
        """Why the background thread cannot run where it shall; empty if it can. Local."""
        cores = self.knobs.thread_affinity
        if cores is None:
            return ""
        if len(cores) < world.local_size:
            return (
                f"HVLIKE_THREAD_AFFINITY={','.join(map(str, cores))} names {len(cores)} cores, but {world.host} has "
                f"{world.local_size} ranks: name one for each."
            )
        core, allowed = cores[world.local_rank], sorted(available())
        if core not in allowed:
            return f"HVLIKE_THREAD_AFFINITY names core {core} for {world}, which may run on {allowed}."
        return ""

    def apply(self, fabric: Fabric) -> None:
        """Do what has to be done once: memory, the place of the thread, the log, the timeline. Local."""
        knobs = self.knobs
        if knobs.keep_memory:
            keep_memory()
        if knobs.thread_affinity is not None:
            fabric.loop.pin(knobs.thread_affinity[fabric.world.local_rank])
        set_up_log(knobs.log_level, fabric.world.rank, hide_time=knobs.log_hide_time)
        world = fabric.world
        logger.debug("%s: local rank %d of %d, %d cores", world, world.local_rank, world.local_size, fabric.cores)
        oddity = launchers.lone_child(os.environ, world.size)
        if oddity:
            logger.warning("%s: %s", world, oddity)
        if knobs.timeline is not None and knobs.timeline != DYNAMIC:
            try:
                fabric.recorder.start(
                    knobs.timeline, mark_cycles=knobs.timeline_mark_cycles, max_bytes=knobs.timeline_max_bytes
                )
            except UsageError as error:
                # It could be written a moment ago, and the other ranks are past the point where all can refuse.
                logger.warning("%s: %s", fabric.world, error)

    def _unwritable(self, rank: int) -> str:
        path = self.knobs.timeline
        if path is None or path == DYNAMIC:
            return ""
        try:
            check_writable(path, rank)
        except UsageError as error:
            return str(error)
        return ""

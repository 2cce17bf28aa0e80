"""The settings of a job: read on each rank, compared among all of them, and put into effect."""

from __future__ import annotations

import logging
import os
from typing import Any

from hvlike.backends.arithmetic.arithmetic import THREADS
from hvlike.config import DYNAMIC, Config, differing, read_config, unknown_variables
from hvlike.errors import UsageError
from hvlike.observe.log import set_up_log
from hvlike.observe.recorder import check_writable, path_of_restart
from hvlike.system.system import system
from hvlike.transport.fabric import Fabric
from hvlike.transport.failure.fault_tolerance import is_enabled
from hvlike.transport.host import launchers
from hvlike.transport.host.launchers import Launcher
from hvlike.transport.memory.malloc import keep_memory
from hvlike.transport.world import World

logger = logging.getLogger("hvlike")


class JobSettings:
    def __init__(self, gradients: str | None = None) -> None:
        """Read the environment. Local; a wrong value is kept for `check`, so that no rank is left waiting in init()."""
        self.knobs = Config()
        self._wrong = ""
        self.unknown = unknown_variables(os.environ)
        given = {} if gradients is None else {"HVLIKE_GRADIENTS": str(gradients)}
        try:
            self.knobs = read_config({**os.environ, **given})
        except UsageError as error:
            self._wrong = str(error)

    def check(self, comm: Any) -> None:
        """Compare with the other ranks; collective. Raises: UsageError, on all ranks, if a value is wrong on one."""
        if self.knobs.spares and not is_enabled(os.environ):
            self._wrong = (
                f"HVLIKE_SPARES={self.knobs.spares} has no effect unless the job outlives a lost rank: start it with "
                "`mpirun --with-ft ulfm` (Open MPI 5), or unset it."
            )
        path = self.knobs.timeline
        if not self._wrong and path is not None and path != DYNAMIC:
            try:
                check_writable(path, comm.Get_rank())
            except UsageError as error:
                self._wrong = str(error)
        answers = comm.allgather((self._wrong, self.knobs, self.unknown))
        wrong = [f"rank {rank}: {text}" for rank, (text, *_) in enumerate(answers) if text]
        if not wrong:
            difference = differing([knobs for _, knobs, _ in answers])
            wrong = [difference] if difference else []
        if wrong:
            raise UsageError(f"hvlike: Horovod initialization failed: {'; '.join(wrong)}")
        # Rank 0 says it for all.
        self.unknown = {name: text for *_, unknown in answers for name, text in unknown.items()}

    def misplaced(self, world: World) -> str:
        cores = self.knobs.thread_affinity
        if cores is None:
            return ""
        if len(cores) < world.local_size:
            return (
                f"HVLIKE_THREAD_AFFINITY={','.join(map(str, cores))} names {len(cores)} cores, but {world.host} has "
                f"{world.local_size} ranks: name one for each."
            )
        core, allowed = cores[world.local_rank], sorted(system.cores())
        if core not in allowed:
            return f"HVLIKE_THREAD_AFFINITY names core {core} for {world}, which may run on {allowed}."
        return ""

    def apply(self, fabric: Fabric) -> None:
        knobs = self.knobs
        THREADS.cores = fabric.cores
        if knobs.keep_memory:
            keep_memory()
        if knobs.thread_affinity is not None:
            fabric.loop.thread_pool.pin(knobs.thread_affinity[fabric.world.local_rank])
        set_up_log(knobs.log_level, fabric.world.rank, hide_time=knobs.log_hide_time)
        world = fabric.world
        logger.debug("%s: local rank %d of %d, %d cores", world, world.local_rank, world.local_size, fabric.cores)
        if world.rank == 0:
            logger.info("%s", start_line(world, launchers.detect_launcher(os.environ)))
            for text in self.unknown.values():
                logger.warning("%s", text)
        oddity = launchers.lone_child_warning(os.environ, world.size)
        if oddity:
            logger.warning("%s: %s", world, oddity)
        if knobs.timeline is not None and knobs.timeline != DYNAMIC:
            # What was recorded before a rank was lost stays.
            path = path_of_restart(knobs.timeline, 0 if world.job is None else world.job.restarts)
            try:
                fabric.recorder.start(path, mark_cycles=knobs.timeline_mark_cycles, max_bytes=knobs.timeline_max_bytes)
            except UsageError as error:
                # It could be written a moment ago, and the other ranks are past the point where all can refuse.
                logger.warning("%s: %s", fabric.world, error)


def start_line(world: World, launcher: Launcher | None) -> str:
    """What the log says at the start: how many ranks there are, on how many nodes, and how they communicate."""
    ranks = f"{world.size} rank{'s' * (world.size != 1)}"
    if len(world.nodes) > 1:
        inside = "shared memory inside of a node, " if max(map(len, world.nodes)) > 1 else ""
        return f"{ranks} on {len(world.nodes)} nodes: {inside}MPI between nodes"
    if world.size > 1:
        return f"{ranks} on 1 node ({world.host}): shared memory"
    alone = "; for several, start the program with mpirun -n N python ..." if launcher is None else ""
    return f"{ranks} on 1 node ({world.host}){alone}"

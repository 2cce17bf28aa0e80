"""Who is lost, told to MPI: the processes of this node are watched, whatever the launcher hears of them.

Under fault tolerance MPI learns of a lost process from the launcher, and the launcher from the end of the process that
it has started itself. What stands between the two hides the loss: a wrapper (`uv run`, `timeout`, a script of the site)
ends in order when the rank below it is killed. So does a process that ends by `_exit` with a status. MPI would wait for
it for ever, in agreements above all. So a thread of each rank looks whether the processes of its node exist, and tells
MPI of those that do not: what MPI knows is the one truth about who is lost, for all that waits, however it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvlike.system.system import of_process, system
from hvlike.transport.failure.fault_tolerance import report_lost
from hvlike.transport.failure.watchdog import Liveness
from hvlike.transport.host.mpi_library import ForkMark, unlink_segments_of

LOOK_SECONDS = 0.1


class LossWatch:
    """The thread of this process. One at a time: a new one takes the place of the last."""

    def __init__(self, neighbours: Mapping[int, tuple[int, str | None]], give_up: Callable[[str, str], None]) -> None:
        """neighbours: process and number on the node, of the other ranks of this node, by rank of COMM_WORLD. give_up:
        ends the job where MPI cannot be told.
        """
        if WATCHING.watch is None:
            # Registered after what ends MPI, so it runs before: who ends well is not lost.
            system.at_exit(_stop_current)
        else:
            WATCHING.watch.stop()
        WATCHING.watch = self
        self._local_ranks = {rank: local for rank, (_, local) in neighbours.items()}
        self._liveness = Liveness({rank: process for rank, (process, _) in neighbours.items()})
        self._give_up = give_up
        self._over = system.Event()
        self._thread = system.Thread(target=self._watch, name="hvlike-loss-watch", daemon=True)
        if neighbours:
            self._thread.start()

    def stop(self) -> None:
        """Watch no more. Blocks for as long as one look takes."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            lost = self._liveness.lost()
            if lost and not report_lost(lost):
                text = f"the processes with the numbers {lost} of the job have vanished, and MPI cannot be told of it"
                self._give_up(f"hvlike: {text}; the job ends", text)
            for local in filter(None, (self._local_ranks[rank] for rank in lost)):
                unlink_segments_of(local)


class _Watching:
    def __init__(self) -> None:
        self.watch: LossWatch | None = None


WATCHING = of_process(_Watching)
"""Has the thread of this process that watches."""


def _stop_current() -> None:
    if WATCHING.watch is not None and not ForkMark.forked:
        WATCHING.watch.stop()

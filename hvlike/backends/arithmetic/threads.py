"""With how many threads a rank adds: with torch's, where it has a core for each of them and nothing else to compute.

Waking torch's threads takes up to 100 us after a pause, and a piece in a core's own cache is added as fast by that
core: from 2 MiB on two threads take less time than one, asleep before or not (`bench kernels`).
"""

from __future__ import annotations

import threading

import torch

THREADED_BYTES = 2 << 20  # Pieces below are added by the calling thread


class Threads:
    """How many threads may add in this process."""

    def __init__(self) -> None:
        self.cores = 1.0  # Of this rank; init() sets it

    def usable(self) -> int:
        """Threads for the additions of the calling thread. 1 where torch is set to more than the rank has cores, and 1
        beside the main thread: that one computes meanwhile, with all of them.
        """
        threads = torch.get_num_threads()
        if 1 < threads <= self.cores and threading.current_thread() is threading.main_thread():
            return threads
        return 1


THREADS = Threads()

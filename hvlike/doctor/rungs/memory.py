"""Memory that the ranks of a node share, against what MPI, hvlike and the user's model need."""

from __future__ import annotations

from dataclasses import replace

from hvlike.collectives import plan
from hvlike.doctor.case import Case, known
from hvlike.doctor.facts.model import Model
from hvlike.doctor.facts.shared_memory import SharedMemory
from hvlike.doctor.finding import Finding, Remark, conclude, fail, skip, warn
from hvlike.doctor.probe import Gap
from hvlike.doctor.rungs.wording import in_bytes
from hvlike.planes.chunks import chunk_bytes
from hvlike.planes.region import region_bytes
from hvlike.transport import cores

OPEN_MPI_BYTES = 16 << 20
"""Room that Open MPI 5 wants to see in /dev/shm when a rank makes its segment; without it, it aborts or takes TCP."""

MPICH_BYTES_A_RANK = 1 << 20
_SMALL = 64 << 20
_RING_BUDGET, _SMALLEST_BUDGET = 2 << 20, 64 << 10
_LANES = 3
"""Those of a training: requests, small requests at once, and the gradients of one optimizer."""

_MORE = "Give it more room: `docker run --shm-size=1g`, in Kubernetes an emptyDir of medium Memory on /dev/shm, "
_MORE += "else `mount -o remount,size=1g /dev/shm`."


def judge(case: Case) -> Finding:
    """The size of /dev/shm on every node and what has to go through it."""
    found, remarks = [], []
    for node in case.nodes:
        facts = case.ranks[node[0]]
        memory = known(facts.memory)
        vendor = "" if isinstance(facts.library, Gap) else facts.library.vendor
        where = f"{facts.host}: " if len(case.nodes) > 1 else ""
        found.append(where + describe(memory))
        # Where the ranks did not come together all may be here.
        wrong = _judge(memory, vendor, max(case.unmet, len(node)))
        remarks += [replace(each, text=where + each.text) for each in wrong]
    return conclude(found, remarks)


def _judge(memory: SharedMemory, vendor: str, local: int) -> list[Remark]:
    remarks = [*_room_for_mpi(memory, vendor, local), *_room_for_rings(memory, local)]
    if memory.total is not None and memory.total <= _SMALL and not remarks:
        text = f"/dev/shm has no more than {in_bytes(memory.total)}"
        remarks.append(warn(text, f"DataLoader workers pass their batches through it. {_MORE}"))
    return remarks


def describe(memory: SharedMemory) -> str:
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
    share = cores.cores_per_rank([each.allowed for each in processors], 0)
    sizes = plan.choose_sizes(None, None, overlaps=cores.has_spare_core(share))
    parts = [[index] for index in range(len(model.sizes))]
    buckets = plan.fill_buckets(parts, model.sizes, model.dtypes, *sizes)
    return [sum(model.sizes[index] for index in bucket) for bucket in buckets]

"""Cores against threads: what each rank may run on, and how many threads it wants."""

from __future__ import annotations

from hvlike.collectives.agreement import name_ranks
from hvlike.doctor.case import Case, known
from hvlike.doctor.facts.processor import Processor
from hvlike.doctor.finding import Finding, Remark, conclude, ok, warn
from hvlike.transport import cores

_BIND = (
    "Let the ranks use them: `mpirun --bind-to none` (Open MPI 5 binds each rank to one core), `mpiexec -bind-to none` "
    "(MPICH), `srun --cpu-bind=none` or `--cpus-per-task=N`."
)


def judge_cores(case: Case) -> Finding:
    """The cores of each rank."""
    found, remarks = [], []
    for node in case.nodes:
        processors = [known(case.ranks[rank].processor) for rank in node]
        shares = [cores.cores_per_rank([each.allowed for each in processors], index) for index in range(len(node))]
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
    crowded = [rank for rank, share in zip(node, shares, strict=True) if cores.is_crowded(share)]
    if crowded and idle:
        text = f"{host}: {name_ranks(crowded)} share {len(used)} core(s), and {len(idle)} more are left to nobody"
        remarks.append(warn(text, _BIND))
    elif not all(map(cores.has_spare_core, shares)) and len(idle) >= len(node):
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


def judge_threads(case: Case) -> Finding:
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

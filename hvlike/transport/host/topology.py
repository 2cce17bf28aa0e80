"""Which ranks share a node, how many cores they have, and what follows. Pure functions over integers and sets.

rank          0  1  2  3  4
node id       0  0  2  2  2        (the lowest rank on the node)
local_rank    0  1  0  1  2        position on the node
local_size    2  2  3  3  3
cross_rank    0  0  1  1  0        position among the ranks with the same local_rank
cross_size    2  2  2  2  1
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

FIRST_LOOKS = 5
LATER_LOOKS = 50  # A look takes some 20 us


@dataclass(eq=False)
class Topology:
    nodes: tuple[tuple[int, ...], ...]  # Ranks of each node, rising; the nodes in the order of their lowest rank
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


def group_by_node(node_ids: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by node; `node_ids[r]` is any value equal exactly for the ranks on the node of rank r."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(node_ids):
        nodes.setdefault(node, []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


def describe_topology(node_ids: Sequence[Hashable], rank: int) -> Topology:
    """The topology as `rank` sees it. Raises: IndexError for a rank that `node_ids` does not have."""
    nodes = group_by_node(node_ids)
    home = next((node for node in nodes if rank in node), None)
    if home is None:
        raise IndexError(f"rank {rank} of {len(node_ids)}")
    local_rank = home.index(rank)
    cross = [node[local_rank] for node in nodes if len(node) > local_rank]
    homogeneous = len({len(node) for node in nodes}) == 1
    return Topology(nodes, local_rank, len(home), cross.index(rank), len(cross), homogeneous)


def machine_id() -> str:
    """What the containers of a machine have in common: a number that its kernel drew at its start; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return boot_id.read().strip()
    except OSError:
        return ""


def cores_on_machine(places: Sequence[tuple[Hashable, frozenset[int]]], rank: int) -> float:
    """`cores_per_rank` among all ranks of a machine: containers count as nodes, and share its cores all the same.

    places: of each rank its `machine_id` and its cores.
    """
    sharing = [each for each, (machine, _) in enumerate(places) if machine == places[rank][0]]
    return cores_per_rank([places[each][1] for each in sharing], sharing.index(rank))


def cores_per_rank(affinities: Sequence[frozenset[int]], rank: int) -> float:
    """Cores of local rank `rank`, each divided by the number of ranks that may run there: four ranks on two: 0.5."""
    return sum(1 / sum(core in each for each in affinities) for core in affinities[rank])


def any_crowded(affinities: Sequence[frozenset[int]]) -> bool:
    """Whether any of these ranks shares cores with another."""
    return any(is_crowded(cores_per_rank(affinities, rank)) for rank in range(len(affinities)))


def any_machine_crowded(places: Sequence[tuple[Hashable, frozenset[int]]]) -> bool:
    """Whether any rank of the job shares cores: the same on all of them. places: as of `cores_on_machine`."""
    machines: dict[Hashable, list[frozenset[int]]] = {}
    for machine, cores in places:
        machines.setdefault(machine, []).append(cores)
    return any(map(any_crowded, machines.values()))


def is_crowded(cores: float) -> bool:
    """True where ranks share cores, so that a waiting one should let the others run."""
    return cores < 1


def has_spare_core(cores: float) -> bool:
    """True where the background thread can work beside the main thread."""
    return cores >= 2


def runnable_threads() -> int:
    """Threads of the whole machine that run or wait for a core now, this one included; 0 where it does not say."""
    try:
        with open("/proc/loadavg") as load:
            return int(load.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


class SpareCore:
    """Whether a core is idle while this rank computes. Other programs, and ranks in other containers, may use those
    that the system allows this one.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._busy = 0

    def is_gone(self) -> bool:
        """Look, the first times and then now and then; True once most looks have found all cores in use."""
        self._looks += 1
        if self._looks <= FIRST_LOOKS or self._looks % LATER_LOOKS == 0:
            # This thread is one of them.
            self._busy += 1 if runnable_threads() >= (os.cpu_count() or 1) else -1
        return self._looks >= FIRST_LOOKS and self._busy > 0

"""The NUMA domains of a machine: which cores each has, where memory lies, and whether the ranks lie well.

A domain is memory and the cores next to it. Memory-only domains exist, too: on GH200 the memory of each GPU. The system
takes a page from the domain of the thread that touches it first. So a rank that stays within one domain has its own
memory there, and its part of what the ranks of a node share, as each rank is the first to write into its own slots.

Of the system this needs no more than /sys and /proc/self/numa_maps, which containers show as well. They may forbid the
calls that tell the same (move_pages, get_mempolicy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hvlike.system.system import system
from hvlike.transport.host.launcher_table import STARTING
from hvlike.transport.host.surroundings import Oddity

_SEGMENTS = ("/memfd:hvlike", "/dev/shm/hvlike-")  # How the files begin through which hvlike shares memory

_TOGETHER = (
    "Files in /dev/shm lie where the first rank of the node runs (see hvlike), and `numactl --membind` binds memory."
)


class Domain(NamedTuple):
    """A NUMA domain that has cores or memory."""

    number: int
    cpus: frozenset[int]  # As sched_getaffinity counts: every hardware thread is one
    cores: int  # Without hardware threads
    has_memory: bool


class Place(NamedTuple):
    """Where a rank lies. Bytes by the number of the domain; both empty where the system does not tell."""

    cpus: frozenset[int]  # On which it may run
    private: Mapping[int, int] = {}  # Its own memory
    shared: Mapping[int, int] = {}  # What it has touched of the memory that hvlike shares on its node


def read_domains(root: Path = Path("/sys/devices/system")) -> tuple[Domain, ...]:
    """Return the domains of this machine, rising. Empty where the kernel knows none. root: where it shows them."""
    found = []
    for folder in (root / "node").glob("node[0-9]*"):
        cpus = parse_numbers(_read(folder / "cpulist"))
        siblings = (_read(root / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus)
        # "Node 0 MemTotal:  16607448 kB"
        sizes = [line.split()[-2] for line in _read(folder / "meminfo").splitlines() if "MemTotal:" in line]
        found.append(Domain(int(folder.name[4:]), cpus, len(set(siblings)), any(size != "0" for size in sizes)))
    return tuple(sorted(domain for domain in found if domain.cpus or domain.has_memory))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def parse_numbers(text: str) -> frozenset[int]:
    """Read a list of the kernel, as "0-3,8"."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))


def place_of_process(maps: Path = Path("/proc/self/numa_maps")) -> Place:
    """Return where this process lies now. The system walks through its page tables for it: some milliseconds."""
    return Place(system.cores(), *parse_maps(_read(maps)))


def parse_maps(text: str) -> tuple[dict[int, int], dict[int, int]]:
    """Return how many bytes of private memory, and of hvlike's shared memory, a numa_maps shows on each domain."""
    private, shared = Counter[int](), Counter[int]()
    for line in text.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split()[2:])
        file = words.get("file", "")
        # Memory that shows a file's contents lies where another process may have read it first.
        into = shared if file.startswith(_SEGMENTS) else private if "anon" in words and not file else Counter()
        page = int(words.get("kernelpagesize_kB", 0)) << 10
        for name, pages in words.items():
            if name[:1] == "N" and name[1:].isdigit():
                into[int(name[1:])] += int(pages) * page
    return dict(private), dict(shared)


@dataclass(frozen=True)
class RanksOnNode:
    """How the ranks of one node lie on its domains."""

    host: str
    domains: tuple[Domain, ...]
    around: frozenset[int]  # All cpus that the launcher could have given to them
    places: Mapping[int, Place]  # Of each rank

    @cached_property
    def usable(self) -> frozenset[int]:
        """The domains on which some rank could run."""
        return self._homes_of(self.around)

    @cached_property
    def homes(self) -> dict[int, frozenset[int]]:
        """The domains on which each rank may run."""
        return {rank: self._homes_of(place.cpus) for rank, place in self.places.items()}

    def _homes_of(self, cpus: frozenset[int]) -> frozenset[int]:
        return frozenset(domain.number for domain in self.domains if domain.cpus & cpus)

    def lines(self) -> list[str]:
        """Return where ranks and memory lie, in words: those that lie alike in one line."""
        alike: dict[str, list[int]] = {}
        for rank, place in self.places.items():
            text = f"cores of {_name('domain', self.homes[rank])}, own memory {_lies(place.private)}"
            alike.setdefault(text, []).append(rank)
        return [
            f"{self.host}: {_name('rank', self.places)} on NUMA {_name('domain', self.usable)}",
            *(f"{self.host}: {_name('rank', ranks)}: {text}" for text, ranks in alike.items()),
            f"{self.host}: memory that the ranks share {_lies(self._shared())}",
        ]

    def _shared(self) -> Mapping[int, int]:
        return sum((Counter(place.shared) for place in self.places.values()), Counter[int]())

    def oddities(self, launcher: str) -> list[Oddity]:
        """Return what makes ranks reach for memory that is not near. launcher: the family of the one in use."""
        fair = max(1, len(self.usable) // len(self.places))
        unbound = [rank for rank, own in self.homes.items() if len(own) > fair]
        idle = self.usable.difference(*self.homes.values())
        counts = Counter(own for own in self.homes.values() if len(own) == 1)
        crowded = [rank for rank, own in self.homes.items() if idle and counts[own] > 1]
        bare = {domain.number for domain in self.domains if not domain.has_memory}
        strayed = [
            rank
            for rank, place in self.places.items()
            if not self.homes[rank] & bare and 2 * _near(place, self.homes[rank]) < sum(place.private.values())
        ]
        wrong = (
            (unbound, "may move between domains, away from the memory in use"),
            (crowded, f"share a domain with others, and nobody runs on {_name('domain', idle)}"),
            (strayed, "most of the own memory lies on domains where the rank does not run"),
        )
        advice = f"Give each rank a domain of its own: {self._flags(launcher)}."
        found = [Oddity(f"{self.host}: {_name('rank', ranks)}: {text}", advice) for ranks, text in wrong if ranks]
        shared = _large(self._shared())
        if len(shared) == 1 and sum(not own & bare for own in counts) > 1:
            found.append(Oddity(f"{self.host}: all memory that the ranks share lies on domain {shared[0]}", _TOGETHER))
        return found

    def _flags(self, launcher: str) -> str:
        """Return how its launcher deals the domains out. A rank gets an even part of the smallest."""
        if launcher not in STARTING:
            return "`numactl --cpunodebind=N --localalloc` before the program"
        sharing = -(-len(self.places) // len(self.usable))
        parts = [(domain, len(domain.cpus & self.around)) for domain in self.domains if domain.number in self.usable]
        cpus = min(count for _, count in parts)
        cores = min(domain.cores * count // len(domain.cpus) for domain, count in parts)
        return STARTING[launcher].to_domains.format(cpus=max(1, cpus // sharing), cores=max(1, cores // sharing))


def _near(place: Place, homes: frozenset[int]) -> int:
    return sum(place.private.get(domain, 0) for domain in homes)


def _name(noun: str, numbers: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-3,8" as the kernel writes lists."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{noun} {listed}" if listed.isdecimal() else f"{noun}s {listed}"


def _large(memory: Mapping[int, int]) -> list[int]:
    """Return the domains that do not have only little of it."""
    return [domain for domain, nbytes in memory.items() if 10 * nbytes > sum(memory.values())]


def _lies(memory: Mapping[int, int]) -> str:
    return f"on {_name('domain', _large(memory))}" if memory else "not known where"

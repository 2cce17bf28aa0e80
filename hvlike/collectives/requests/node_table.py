"""What the leader of a node has heard from its members and not yet told the coordinator. No messages.

Where a process set spans several nodes, the first member of each is its leader: the others speak to the coordinator
through it and hear from it, so what the coordinator takes and sends grows with the nodes and not with the ranks.

    asked for by all members of the node    goes on at once, as one entry where they ask for the same
    asked for by some                       with the next health check, or before a report of one of them, so that
                                            whoever looks for missing ranks knows of it
    anything while a member has joined      at once: nothing waits for those that have joined
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvlike.collectives.requests.join_protocol import JOIN_KEY
from hvlike.collectives.requests.request import RequestKey, RequestSpec

Entry = tuple[str, RequestSpec | int]  # A name, and a spec or the number of one that was announced before
ReadyList = list[tuple[tuple[int, ...], list[Entry]]]  # Which members, by position, ask for what, in this order


def tree_of(nodes: Sequence[Sequence[int]], position: int) -> tuple[int, Sequence[int]]:
    """Through whom the member at `position` speaks to the coordinator, and to whom it passes on what that says."""
    leader, *others = next(node for node in nodes if position in node)
    if position != leader:
        return leader, ()
    if position != 0:
        return 0, others
    # First what has the longest way.
    return 0, [*(node[0] for node in nodes if node[0] != 0), *others]


class NodeTable:
    def __init__(self, size: int, kind_of: Callable[[int], str]) -> None:
        """size: how many members the node has; kind_of: the kind of the spec that has this number."""
        self._size = size
        self._kind_of = kind_of
        self._asked: dict[RequestKey, dict[int, RequestSpec | int]] = {}  # By position; not told yet
        self._told: dict[RequestKey, int] = {}  # Of how many members the coordinator knows, where it knew only of some
        self._joining = False

    def collect(self, ready: ReadyList, *, at_once: bool = False) -> ReadyList:
        """Members of the node ask for these. Returns what to tell the coordinator now; at_once: everything."""
        told: ReadyList = []
        for positions, entries in ready:
            for name, entry in entries:
                key = (self._kind_of(entry) if isinstance(entry, int) else entry.kind, name)
                asked = self._asked.setdefault(key, {})
                asked.update(dict.fromkeys(positions, entry))
                self._joining = self._joining or key == JOIN_KEY
                if len(asked) + self._told.get(key, 0) == self._size and not self._joining:
                    del self._asked[key]
                    _add(told, name, asked)
            if at_once or self._joining:
                told += self.take()
        return told

    def take(self) -> ReadyList:
        """All that the coordinator was not told yet, in the order in which it was asked for first."""
        told: ReadyList = []
        for key, asked in self._asked.items():
            self._told[key] = self._told.get(key, 0) + len(asked)
            _add(told, key[1], asked)
        self._asked.clear()
        return told

    def decided(self, key: RequestKey) -> None:
        """The coordinator has announced `key`: whoever asks for it from now on begins anew."""
        self._asked.pop(key, None)
        self._told.pop(key, None)
        if key == JOIN_KEY:
            self._joining = False


def _add(told: ReadyList, name: str, asked: Mapping[int, RequestSpec | int]) -> None:
    for entry in dict.fromkeys(asked.values()):
        positions = tuple(position for position, each in asked.items() if each == entry)
        if told and told[-1][0] == positions:
            told[-1][1].append((name, entry))
        else:
            told.append((positions, [(name, entry)]))

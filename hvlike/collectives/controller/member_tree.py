"""The way of messages between the members of a process set: the first member of each node speaks for the others there.

                        coordinator (the first member)
                       /              |               \\
          others of its node    first of node B    first of node C
                                  /       \\
                                 others of B

    up       what members ask for and what they report, in this order; the first member of a node waits a while with
             what only some of its node have asked for (NodeTable)
    down     what the coordinator has announced
    direct   questions about ranks that hang, and the answers: the one between may hang itself
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvlike.collectives.requests.message_table import NodeTable, ReadyList, tree_of
from hvlike.transport.fabric import Fabric
from hvlike.transport.loop.coroutine import in_loop
from hvlike.transport.messages.traffic import Topic
from hvlike.transport.world import Group

READY, WAITING, RESUMED, FAILURE = "ready", "waiting", "resumed", "failure"  # Up
RESPONSES, FAILED = "responses", "failed"  # Down
INSPECT, ANSWER, END, OPTIONS = "inspect", "answer", "end", "options"  # Direct


class MemberTree:
    def __init__(self, fabric: Fabric, group: Group, kind_of: Callable[[int], str]) -> None:
        """kind_of: the kind of the spec that has this number."""
        parent, children = tree_of(group.nodes, group.rank)
        self.me = fabric.world.rank
        self.ranks = group.ranks
        self.position = group.rank  # Of this rank in the set
        self.parent = group.ranks[parent]
        self._children = [group.ranks[position] for position in children]
        self._number = group.number
        self._channel = fabric.channel
        self._closed = False
        self.table: NodeTable | None = None  # On a rank that speaks for others
        if group.rank != 0 and children:
            self.table = NodeTable(group.local_size, kind_of)

    @in_loop
    def send(self, rank: int, what: str, value: Any) -> None:
        """Have `Controller.hear` called on one member."""
        self._channel.send(rank, Topic.CONTROLLER, (self._number, what, value), kind=what)

    @in_loop
    def send_to_all(self, what: str, value: Any) -> None:
        """Tell all other members, directly; on the coordinator."""
        for rank in self.ranks[1:]:
            self.send(rank, what, value)

    @in_loop
    def pass_down(self, what: str, value: Any) -> None:
        for rank in self._children:
            self.send(rank, what, value)

    @in_loop
    def ask(self, ready: ReadyList, *, at_once: bool) -> None:
        """Tell the coordinator what this rank, or those that it speaks for, ask for; at_once: wait for nobody."""
        if self.table is None:
            self.send(self.parent, READY, ready)
        else:
            self._tell(self.table.collect(ready, at_once=at_once))

    @in_loop
    def report(self, what: str, report: tuple[int, Any]) -> None:
        """Tell the coordinator something of the member at a position; it overtakes no request."""
        self.flush()
        if not self._closed:
            self.send(self.parent, what, report)

    @in_loop
    def flush(self) -> None:
        """Tell the coordinator what only some members of this node have asked for so far."""
        if self.table is not None:
            self._tell(self.table.take())

    @in_loop
    def close(self) -> None:
        """Nothing can run any more: the members below hear that from others."""
        self._closed = True

    def _tell(self, ready: ReadyList) -> None:
        if ready and not self._closed:
            self.send(self.parent, READY, ready)

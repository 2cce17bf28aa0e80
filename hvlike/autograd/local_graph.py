"""The graph of autograd on one worker: the part of it that a backward leads to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import Node

from hvlike.autograd.graph import Scan
from hvlike.autograd.leaf_hooks import Hooks, hooks_of
from hvlike.autograd.receive_function import end_of, recv_of

if TYPE_CHECKING:
    from hvlike.autograd.distributed_context import Recv


class LocalGraph:
    """What was reached so far. Who uses it keeps the graph itself alive."""

    def __init__(self, recvs: Mapping[int, Recv]) -> None:
        """recvs: those that count, by message id."""
        # A node's Python object stays the same only while somebody holds it: the scan does.
        self.scan: Scan[Node] = Scan(attrgetter("next_functions"))
        self.leaves: dict[Node, Tensor] = {}
        """The leaves that were reached, by the nodes that would add to their .grad."""
        self.recvs: dict[Node, Recv] = {}
        """The recvs that were reached, by their nodes."""
        self._hooks: dict[Node, tuple[Hooks, Hooks]] = {}
        """Of the nodes of leaves, where they were looked up."""
        self._counted = recvs

    def reach(self, nodes: Iterable[Node]) -> list[Recv]:
        """Go on from these nodes; return the recvs that were not reached before."""
        found = []
        for end in self.scan.reach(nodes):
            recv = recv_of(end)
            if recv is None:
                if (leaf := getattr(end, "variable", None)) is not None:
                    self.leaves[end] = leaf
            elif self._counted.get(recv.message) is recv:
                self.recvs[end] = recv
                found.append(recv)
            else:
                # Of another context: its function says so when it is run.
                self.leaves[end_of(end)] = recv.dummy
        return found

    def look_up_hooks(self) -> None:
        """Do what `hooks` would do for the leaves that were reached: each takes as long as storing a gradient."""
        for node in self.leaves:
            if node not in self._hooks:
                self._hooks[node] = hooks_of(node)

    def hooks(self, node: Node) -> tuple[Hooks, Hooks]:
        """The hooks of a leaf's node."""
        return self._hooks.get(node) or hooks_of(node)

    def forget(self) -> None:
        """Keep nothing of the graph."""
        for kept in (self.scan.edges, self.scan.waits, self.leaves, self.recvs, self._hooks):
            kept.clear()

"""The part of a backward that one worker runs: which nodes of its graph can run, and running them.

Nothing is sent from here. Call `resolve` with what other workers have sent; `emit` is called with what has to go to
them. While gradients of sends are missing, everything that can run without them and that others wait for runs in
segments. When none is missing, the rest runs in one last segment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hvlike.autograd.accumulate_grad import deliver, is_sole
from hvlike.autograd.engine import SegmentRecord, Values, add_value, run_engine, take_values
from hvlike.autograd.graph import Plan, clear, plan
from hvlike.autograd.local_graph import LocalGraph, captured_edges
from hvlike.rpc.wire.devices import ReadyEvents, to_device, to_host

if TYPE_CHECKING:
    from hvlike.autograd.context import Recv, Send


Emit = Callable[["Recv", "list[Tensor | None] | None"], None]


class LocalBackward:
    """One backward pass on one worker. Not thread-safe: the caller holds the context's lock during every call.

    engage -> (resolve*, step)* until `finished`. After an exception the object is of no more use, and has let go of
    everything it put anywhere.
    """

    def __init__(
        self,
        sends: Mapping[int, Send],
        recvs: Mapping[int, Recv],
        gradients: dict[Tensor, Tensor],
        emit: Emit,
        *,
        retain_graph: bool = False,
        waits_for: Collection[int] | None = None,
        graph: LocalGraph | None = None,
    ) -> None:
        """sends, recvs: those of the context, by message id; copied. gradients: the context's, by leaf; added to.

        emit: called exactly once for each of the recvs, in any thread and from inside of autograd's engine too, so it
        may only put things into a queue. Its second argument is the gradients of the recv's tensors; None where the
        recv is not reached by this backward; a list of nothing but None where it is reached and got nothing.
        retain_graph: as for torch. waits_for: the sends that `resolve` will be called for; None means all.
        graph: with the same recvs, where something has looked through it before.
        """
        self.segments: list[SegmentRecord] = []
        """What has run, in this order."""
        self.finished = False
        """Everything has run: each recv was emitted, each gradient of a leaf is in the context's map."""
        self.marks: ReadyEvents | None = None
        """Where in the streams of GPUs the gradients of leaves are there, if any are on one."""
        self._gradients = gradients
        self._emit = emit
        self._retain_graph = retain_graph
        self._pending = {
            message: send.edges for message, send in sends.items() if waits_for is None or message in waits_for
        }
        self._devices = {message: sends[message].devices for message in self._pending if sends[message].devices}
        self._silent = dict(recvs)
        """The recvs that were not emitted."""
        self._graph = LocalGraph(recvs) if graph is None else graph
        self._values: Values = {}
        self._answered: list[int] = []
        """Messages that were resolved since the last segment."""
        self._starts: list[Node] = []
        self._order: list[Node] | None = None
        """What can run and has not, each node before its children; None while that was not of interest."""
        self._cleared: set[Node] = set()
        """These, and what has run."""

    def engage(self, roots: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        """Look through the graph below the roots and sends; once, before anything else. Runs nothing.

        roots: edges and their gradients; empty where the backward was begun on another worker. The caller keeps the
        graph below them alive until it is finished. Emits None for recvs that are not reached.
        """
        awaited = [edge.node for edges in self._pending.values() for edge in edges]
        self._starts = [*(edge.node for edge, _ in roots), *awaited]
        self._graph.reach(self._starts)
        for node in awaited:
            self._graph.scan.waits[node] += 1
        for edge, gradient in roots:
            add_value(self._values, edge.node, edge.output_nr, gradient)
        reached = {recv.message for recv in self._graph.recvs.values()}
        for message in [message for message in self._silent if message not in reached]:
            self._emit(self._silent.pop(message), None)

    def resolve(self, message: int, gradients: Sequence[Tensor | None] | None) -> None:
        """Take the gradients of what was sent in a message, in order of Send.edges; None: there are none, ever.

        Runs nothing. A message that is not waited for, or no more, is ignored.
        """
        edges = self._pending.pop(message, None)
        if edges is None:
            return
        self._answered.append(message)
        gradients = self._placed(message, gradients)
        waits = self._graph.scan.waits
        ready = []
        for edge, gradient in zip(edges, [None] * len(edges) if gradients is None else gradients, strict=True):
            if gradient is not None:
                add_value(self._values, edge.node, edge.output_nr, gradient)
            waits[edge.node] -= 1
            if not waits[edge.node]:
                ready.append(edge.node)
        if self._order is not None:
            self._clear(ready)

    def step(self) -> None:
        """Run what can run now; best after all messages that are there have been resolved: it makes fewer segments.

        During the call `recv.run` of the recvs is this object, whose method `ran` the Receive function calls.
        Raises: whatever the code of the user and of autograd raises.
        """
        if self.finished:
            return
        try:
            if self._pending:
                self._advance()
            else:
                self._finish()
        except BaseException:
            self._let_go()
            raise

    def ran(self, recv: Recv, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of a recv's tensors are there. In the engine's thread where its function has them."""
        if self._silent.pop(recv.message, None) is not None:
            # Those of a GPU travel as copies in host memory.
            self._emit(recv, [each if each is None or each.is_cpu else to_host(each) for each in gradients])

    def _placed(self, message: int, gradients: Sequence[Tensor | None] | None) -> Sequence[Tensor | None] | None:
        """What has come for a message, where its tensors are."""
        devices = self._devices.get(message)
        if devices is None or gradients is None:
            return gradients
        return [
            None if gradient is None else to_device(gradient, device)
            for gradient, device in zip(gradients, devices, strict=True)
        ]

    def _clear(self, ready: Sequence[Node]) -> None:
        """These nodes wait for nothing any more."""
        scan = self._graph.scan
        order = clear(scan.edges, scan.waits, ready)
        self._cleared.update(order)
        self._order = order if self._order is None else self._order + order

    def _advance(self) -> None:
        """Run what is worth to run while gradients of sends are missing."""
        graph = self._graph
        if self._order is None:
            self._clear([node for node in dict.fromkeys(self._starts) if not graph.scan.waits[node]])
        leaves, recvs = graph.leaves, graph.recvs
        chosen = plan(
            graph.scan.edges,
            self._order or [],
            self._cleared,
            is_target=lambda node: node in leaves or node in recvs,
            is_urgent=recvs.__contains__,
            # A hook of the leaf would see a part of its gradient.
            is_passive=lambda node: node in leaves and not leaves[node]._backward_hooks,
        )
        if chosen is not None:
            self._order = chosen.later
            ends = [node for node in chosen.nodes if node in leaves or node in recvs]
            self._run(chosen, ends, "selective" if chosen.boundaries else "plain", len(chosen.nodes))

    def _finish(self) -> None:
        """Run the rest: no gradient is missing."""
        graph = self._graph
        count = len(graph.scan.edges) - len(self._cleared) + len(self._order or [])
        self._run(Plan(list(self._values), []), [*graph.recvs, *graph.leaves], "final", count)
        self.finished = True
        self._let_go()

    def _run(self, chosen: Plan[Node], ends: Sequence[Node], kind: str, count: int) -> None:
        """Run one segment. ends: the leaves and recvs in it. count: its nodes, for those who look on."""
        start = time.perf_counter_ns()
        graph = self._graph
        leaves = [node for node in ends if node in graph.leaves]
        doors = [node for node in ends if node in graph.recvs]
        recvs = [graph.recvs.pop(node) for node in doors]
        inputs = [edge for node, recv in zip(doors, recvs, strict=True) for edge in captured_edges(node, recv)]
        skip = len(inputs)
        inputs += [GradientEdge(node, 0) for node in (*chosen.partial, *leaves)]
        for recv in recvs:
            recv.run = self
        try:
            outputs = take_values(self._values, chosen.nodes)
            captured = run_engine(outputs, inputs, chosen.boundaries, graph.scan.edges, self._catch, self._retain_graph)
        finally:
            for recv in recvs:
                recv.run = None
        self._hand_over(captured[:skip], recvs)
        del captured[:skip]
        self._keep(captured, chosen.partial, leaves)
        numbers = tuple(recv.message for recv in recvs)
        end = time.perf_counter_ns()
        self.segments.append(SegmentRecord(kind, count, tuple(self._answered), numbers, len(leaves), start, end))
        self._answered.clear()

    def _hand_over(self, captured: list[Tensor | None], recvs: Sequence[Recv]) -> None:
        """Emit what has come to the recvs, unless their functions have."""
        place = 0
        for recv in recvs:
            if recv.has_hooks:
                # The engine leaves out what gets nothing but undefined gradients.
                self.ran(recv, [None] * recv.count)
                place += 1
            else:
                self.ran(recv, captured[place : place + recv.count])
                place += recv.count

    def _catch(self, node: Node, number: int, gradient: Tensor) -> None:
        """Called for gradients that go to nodes which do not run yet."""
        add_value(self._values, node, number, gradient)

    def _keep(self, captured: list[Tensor | None], partial: Sequence[Node], leaves: Sequence[Node]) -> None:
        """Put away what was captured; the list is emptied, so that each gradient is held by as few as possible."""
        devices: dict[torch.device, None] = {}
        captured.reverse()
        for node in partial:
            if (gradient := captured.pop()) is not None:
                add_value(self._values, node, 0, gradient)
        for node in leaves:
            leaf, gradient = self._graph.leaves.pop(node), captured.pop()
            if gradient is not None:
                # Asked while nothing but this variable holds it.
                sole = is_sole(gradient)
                if not gradient.is_cpu:
                    devices[gradient.device] = None
                deliver(self._gradients, self._graph.hooks(node), leaf, gradient, sole)
        if devices:
            self.marks = ReadyEvents(devices)

    def _let_go(self) -> None:
        """Keep nothing of the graph."""
        self._pending, self._silent, self._values = {}, {}, {}
        self._starts, self._order, self._cleared = [], None, set()
        self._graph.forget()

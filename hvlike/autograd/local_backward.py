"""The part of a backward that one worker runs: which nodes of its graph can run, and running them.

Nothing is sent from here. Call `resolve` with what other workers have sent; `emit` is called with what has to go to
them. While gradients of sends are missing, everything that can run without them and that others wait for runs in
segments. When none is missing, the rest runs in one last segment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hvlike.autograd.accumulate_grad import accumulate_with_hooks, is_sole
from hvlike.autograd.context import DistributedContext, Recv, Send
from hvlike.autograd.engine import SegmentRecord, Values, add_value, run_engine, take_values
from hvlike.autograd.graph import BackwardPlan, clear, plan
from hvlike.autograd.local_graph import LocalGraph, captured_edges
from hvlike.autograd.protocol import Gradients
from hvlike.rpc.wire.devices import ReadyEvents
from hvlike.rpc.wire.tensors import SHORT_BYTES
from hvlike.training.ddp.end_of_backward import Collected, collecting

if TYPE_CHECKING:
    from hvlike.autograd.backward import BackwardPass

Roots = Sequence[tuple[GradientEdge, Tensor]]  # Where backward begins, and with which gradients
Emit = Callable[[int, int, "Gradients | None"], None]  # Takes recv, sender, gradients; see BackwardState.emit


class LocalBackward:
    """One backward on one worker, a protocol.Machine. Make every call with the context's lock held.

    reach* -> engage -> (resolve*, step)* until `finished`. After an exception the object is of no more use; it has
    removed everything that it had put into the graph.
    """

    def __init__(
        self,
        context: DistributedContext,
        roots: Roots,
        emit: Emit,
        *,
        listener: BackwardPass,
        retain_graph: bool = False,
    ) -> None:
        """roots: empty where the backward was begun on another worker. The caller keeps the graph below them alive.

        emit: called exactly once for each recv, in any thread and from inside of autograd's engine, so it may only put
        things into a queue. Gradients of None: this backward does not lead to the recv; a list of nothing but None: it
        does, and no gradient came.
        listener: what the context tells what happens.
        """
        self.segments: list[SegmentRecord] = []  # What has run, in this order
        self._context = context
        self._roots = roots
        self._emit = emit
        self._listener = listener
        self._retain_graph = retain_graph
        self._through_modules = Collected(context.gradients)  # The data-parallel modules on the way
        self._has_run = False
        self._sends: dict[int, Send] = {}
        self._recvs: dict[int, Recv] = {}
        self._graph: LocalGraph | None = None
        self._pending: dict[int, Send] = {}  # The sends whose gradients are missing
        self._silent: dict[int, Recv] = {}  # The recvs that were not emitted
        self._values: Values = {}
        self._answered: list[int] = []  # The sends that were resolved since the last segment
        self._starts: list[Node] = []
        self._order: list[Node] | None = None
        """The nodes that can run and have not, each before its children. None before they are needed."""
        self._cleared: set[Node] = set()  # These nodes, and those that have run

    @property
    def finished(self) -> bool:
        """Whether everything has run and is reduced: each recv was emitted, the context has all gradients."""
        return self._has_run and not self._through_modules

    @property
    def has_to_reduce(self) -> bool:
        return self._has_run and bool(self._through_modules)

    def reduce(self) -> None:
        """Reduce the gradients of data-parallel modules in the context. Blocks. Raises: what that raises."""
        self._through_modules()

    def reach(self, sends: Collection[int] | None) -> Mapping[int, int]:
        """Go on from some sends, None: from the roots. Returns the recvs that are new, with their ranks."""
        if self._graph is None:
            # Not the graph that was scanned ahead: that one leads from all sends.
            self._engage_in_context()
            self._graph = LocalGraph(self._recvs)
        if sends is None:
            edges = [edge for edge, _ in self._roots]
        else:
            edges = [edge for send in sends if send in self._sends for edge in self._sends[send].edges]
        return {recv.id: recv.rank for recv in self._graph.reach([edge.node for edge in edges])}

    def engage(self, sends: Collection[int] | None) -> Mapping[int, int]:
        """Begin the run, in which these sends count; once. Returns the sends that wait for gradients, with their ranks.

        Runs nothing. Emits None for the recvs that are not reached; after `reach`, only recvs that were reached count.
        """
        if self._graph is None:
            ahead = self._engage_in_context()
            self._graph = LocalGraph(self._recvs) if ahead is None else ahead
            self._silent = dict(self._recvs)
        else:
            self._silent = {recv.id: recv for recv in self._graph.recvs.values()}
        graph = self._graph
        self._pending = {send.id: send for send in self._sends.values() if sends is None or send.id in sends}
        self._context.segments = self.segments
        awaited = [edge.node for send in self._pending.values() for edge in send.edges]
        self._starts = [*(edge.node for edge, _ in self._roots), *awaited]
        graph.reach(self._starts)
        for node in awaited:
            graph.scan.waits[node] += 1
        for edge, gradient in self._roots:
            add_value(self._values, edge.node, edge.output_nr, gradient)
        reached = {recv.id for recv in graph.recvs.values()}
        for recv in [recv for recv in self._silent.values() if recv.id not in reached]:
            del self._silent[recv.id]
            self._emit(recv.id, recv.rank, None)
        return {send.id: send.rank for send in self._pending.values()}

    def resolve(self, send: int, gradients: Gradients | None) -> None:
        """Take the gradients of a send, in order of its tensors; None: there will be none. Runs nothing.

        A send that is not waited for is ignored.
        """
        answered = self._pending.pop(send, None)
        if answered is None or self._graph is None:
            return
        self._answered.append(send)
        edges, devices = answered.edges, answered.devices
        if gradients is None:
            gradients = [None] * len(edges)
        elif devices:
            gradients = [
                None if gradient is None else gradient.to(device)
                for gradient, device in zip(gradients, devices, strict=True)
            ]
        waits = self._graph.scan.waits
        ready = []
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                add_value(self._values, edge.node, edge.output_nr, gradient)
            waits[edge.node] -= 1
            if not waits[edge.node]:
                ready.append(edge.node)
        if self._order is not None:
            self._clear(self._graph, ready)

    def step(self) -> None:
        """Run what can run now. Call it after all sends that have answers were resolved: that makes fewer segments.

        During the call the Receive functions of recvs with hooks deliver their gradients here.
        Raises: what the code of the user and of autograd raises.
        """
        graph = self._graph
        if self._has_run or graph is None:
            return
        try:
            with collecting(self._through_modules):
                if self._pending:
                    self._run_segment(graph)
                else:
                    self._run_rest(graph)
        except BaseException:
            self._forget(graph)
            raise

    def describe_unused(self, send: int, rank: int) -> str:
        """The error of FAST on this rank for a send that the backward does not lead to."""
        unused = self._sends[send]
        what = unused.about or "an RRef's value"
        return (
            f'mode="fast" needs every tensor that was sent in this context: of the call {what}, what rank {rank} has '
            f"sent to rank {unused.rank} is not used by the roots of this backward. Use the result, leave the call out "
            'of the context, or pass mode="safe" or mode="smart".'
        )

    def _engage_in_context(self) -> LocalGraph | None:
        self._sends, self._recvs, ahead = self._context.engage(self._listener)
        return ahead

    def _clear(self, graph: LocalGraph, ready: Sequence[Node]) -> None:
        order = clear(graph.scan.edges, graph.scan.waits, ready)
        self._cleared.update(order)
        self._order = order if self._order is None else self._order + order

    def _run_segment(self, graph: LocalGraph) -> None:
        """Run the next segment, if any is worth it, while gradients of sends are missing."""
        if self._order is None:
            self._clear(graph, [node for node in dict.fromkeys(self._starts) if not graph.scan.waits[node]])
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
            self._run(graph, chosen, ends, "selective" if chosen.boundaries else "plain", len(chosen.nodes))

    def _run_rest(self, graph: LocalGraph) -> None:
        count = len(graph.scan.edges) - len(self._cleared) + len(self._order or [])
        self._run(graph, BackwardPlan(list(self._values), []), [*graph.recvs, *graph.leaves], "final", count)
        self._has_run = True
        self._forget(graph)

    def _run(self, graph: LocalGraph, chosen: BackwardPlan[Node], ends: Sequence[Node], kind: str, count: int) -> None:
        """Run one segment. ends: the leaves and recvs in it. count: the number of its nodes, for reports."""
        start = time.perf_counter_ns()
        leaves = [node for node in ends if node in graph.leaves]
        receives = [node for node in ends if node in graph.recvs]
        recvs = [graph.recvs.pop(node) for node in receives]
        inputs = [edge for node, recv in zip(receives, recvs, strict=True) for edge in captured_edges(node, recv)]
        inputs += [GradientEdge(node, 0) for node in (*chosen.partial, *leaves)]
        for recv in recvs:
            recv.deliver = self._deliver
        try:
            outputs = take_values(self._values, chosen.nodes)
            # What comes to nodes that do not run yet is kept.
            keep = partial(add_value, self._values)
            captured = run_engine(outputs, inputs, chosen.boundaries, graph.scan.edges, keep, self._retain_graph)
        finally:
            for recv in recvs:
                recv.deliver = None
        # What is captured is taken from the end of the list, so that each gradient has as few references as possible.
        captured.reverse()
        for recv in recvs:
            if recv.has_hooks:
                # Its function has delivered, unless all gradients are undefined: the engine leaves it out then.
                captured.pop()
                self._deliver(recv, [None] * recv.count)
            else:
                self._deliver(recv, [captured.pop() for _ in range(recv.count)])
        self._keep(graph, captured, chosen.partial, leaves)
        ids = tuple(recv.id for recv in recvs)
        end = time.perf_counter_ns()
        self.segments.append(SegmentRecord(kind, count, tuple(self._answered), ids, len(leaves), start, end))
        self._answered.clear()

    def _deliver(self, recv: Recv, gradients: Sequence[Tensor | None]) -> None:
        """Emit the gradients of a recv's tensors, once. In the engine's thread where its function has them."""
        if self._silent.pop(recv.id, None) is not None:
            self._emit(recv.id, recv.rank, [None if each is None else _to_send(each) for each in gradients])

    def _keep(
        self, graph: LocalGraph, captured: list[Tensor | None], partial: Sequence[Node], leaves: Sequence[Node]
    ) -> None:
        """Keep the captured gradients of nodes that run later, and add those of leaves to the context's."""
        devices: dict[torch.device, None] = {}
        for node in partial:
            if (gradient := captured.pop()) is not None:
                add_value(self._values, node, 0, gradient)
        for node in leaves:
            leaf, gradient = graph.leaves.pop(node), captured.pop()
            if gradient is not None:
                # Asked while only this variable refers to it.
                sole = is_sole(gradient)
                if not gradient.is_cpu:
                    devices[gradient.device] = None
                accumulate_with_hooks(self._context.gradients, graph.hooks(node), leaf, gradient, sole)
        if devices:
            self._context.gradients_ready = ReadyEvents(devices)

    def _forget(self, graph: LocalGraph) -> None:
        self._pending, self._silent, self._values = {}, {}, {}
        self._roots = ()
        self._starts, self._order, self._cleared = [], None, set()
        graph.forget()


def _to_send(gradient: Tensor) -> Tensor:
    if not gradient.is_cpu:
        # It travels as a copy in host memory.
        return gradient.detach().cpu()
    # The gradient of a sum is an expanded number. Contiguous tensors travel cheaper.
    is_short = gradient.layout is torch.strided and gradient.nbytes <= SHORT_BYTES
    return gradient.contiguous() if is_short else gradient

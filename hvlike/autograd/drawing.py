"""draw: a picture of a context's graph on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hvlike.autograd.contexts import checked_id, contexts
from hvlike.autograd.distributed_context import DistributedContext
from hvlike.autograd.dot import Node, Part, write_dot
from hvlike.autograd.identifiers import in_words
from hvlike.autograd.receive_function import recv_of
from hvlike.errors import UsageError
from hvlike.rpc.agent import Agent, current
from hvlike.rpc.calls import rpc_async
from hvlike.rpc.contexts import NO_CONTEXT, inside


def draw(context_id: int, roots: Sequence[Tensor] = ()) -> str:
    """The graph of a context on all workers that it has reached, in Graphviz's DOT language.

    One cluster for each worker, with what leads to the tensors that it has sent; arrows show where gradients go, dashed
    ones between workers. After a backward, the segments that each worker has run stand above its part, and beside each
    message the segments that have used or made its gradients.
    context_id: from `context`. roots: tensors of this worker that backward is called with; their graph is drawn too.
    Any worker that knows the context; blocks until all that it has reached have answered. Not while a backward of the
    context is running.
    Returns DOT: `dot -Tsvg` draws it.
    Raises: RuntimeError "Could not find autograd context with id" where there is none; TypeError for an id that is no
        int; UsageError for roots that have no graph; what rpc_sync raises.
    """
    agent = current()
    graph = LocalPicture(agent, contexts.find(checked_id("draw", context_id)))
    for root in roots:
        if not isinstance(root, Tensor) or root.grad_fn is None:
            raise UsageError(f"draw: roots must be tensors that have a grad_fn, got {_describe(root)}.")
        graph.add_root(root)
    parts = [graph.part()]
    known, ask = {agent.rank}, graph.reached
    # Questions about a context are not a part of it.
    with inside(NO_CONTEXT):
        while ask := ask - known:
            known |= ask
            futures = [rpc_async(rank, _part_of, (context_id,)) for rank in sorted(ask)]
            answers = [answer for future in futures if (answer := future.wait()) is not None]
            parts += [part for part, _ in answers]
            ask = {rank for _, reached in answers for rank in reached}
    return write_dot(f"autograd context {context_id}", parts)


class LocalPicture:
    """What this worker has of a context's graph, piece by piece."""

    def __init__(self, agent: Agent, context: DistributedContext) -> None:
        self.reached = set(context.reached)
        """The workers that may have more of it."""
        self._agent = agent
        self._context = context
        self._nodes: list[Node] = []
        self._edges: list[tuple[int, int]] = []
        self._sends: dict[int, int] = {}
        self._recvs: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}
        """Of torch's nodes. Python's objects for them are equal only as long as somebody holds them."""
        for send in list(context.sends.values()):
            text = f"to {self._name(send.rank)}: {in_words(send.message)}\n{send.about}"
            number = self._sends[send.message] = self._add("send", text, self._segments("sends", send.message))
            self._lead(number, [edge.node for edge in send.edges])

    def add_root(self, tensor: Tensor) -> None:
        """Add a tensor that backward begins with, and what leads to it."""
        self._lead(self._add("root", f"root\n{_describe(tensor)}"), [get_gradient_edge(tensor).node])

    def part(self) -> Part:
        """All of it. Messages that nothing was made of stand alone."""
        for recv in list(self._context.recvs.values()):
            if recv.message not in self._recvs:
                self._add_recv(recv.message, recv.rank)
        rank = self._agent.rank
        segments = [f"{segment.kind}, nodes: {segment.nodes}" for segment in self._context.segments]
        return Part(
            rank, self._name(rank), tuple(self._nodes), tuple(self._edges), self._sends, self._recvs, tuple(segments)
        )

    def _lead(self, start: int, nodes: Sequence[Any]) -> None:
        """Draw edges to nodes of torch, and all that lies behind these."""
        todo: list[tuple[int, Any]] = [(start, node) for node in nodes]
        while todo:
            before, node = todo.pop()
            number = self._numbers.get(node)
            if number is None:
                number = self._numbers[node] = self._add_node(node)
                if recv_of(node) is None:
                    todo += [(number, child) for child, _ in node.next_functions if child is not None]
            self._edges.append((before, number))

    def _add_node(self, node: Any) -> int:
        recv, leaf = recv_of(node), getattr(node, "variable", None)
        if recv is not None:
            return self._add_recv(recv.message, recv.rank)
        if isinstance(leaf, Tensor):
            done = "\nhas a gradient" if leaf in self._context.gradients else ""
            return self._add("leaf", f"leaf\n{_describe(leaf)}{done}")
        return self._add("node", node.name())

    def _add_recv(self, message: int, rank: int) -> int:
        number = self._add("recv", f"from {self._name(rank)}: {in_words(message)}", self._segments("recvs", message))
        self._recvs[message] = number
        return number

    def _add(self, kind: str, text: str, segments: tuple[int, ...] = ()) -> int:
        number = len(self._nodes)
        self._nodes.append(Node(number, kind, text, segments))
        return number

    def _segments(self, end: str, message: int) -> tuple[int, ...]:
        """The segments of the last backward that have taken, or brought, the gradients of a message."""
        ran = enumerate(self._context.segments, 1)
        return tuple(number for number, segment in ran if message in getattr(segment, end))

    def _name(self, rank: int) -> str:
        return self._agent.workers[rank].name


def _part_of(context_id: int) -> tuple[Part, set[int]] | None:
    """Runs on a worker: its part, and which workers may have more; None where the context is not."""
    if context_id not in contexts.live():
        return None
    picture = LocalPicture(current(), contexts.find(context_id))
    return picture.part(), picture.reached


def _describe(value: object) -> str:
    """Shape and dtype of a tensor; the type of anything else."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__

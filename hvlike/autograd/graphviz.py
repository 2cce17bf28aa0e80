"""draw(): a picture of a context's graph on all workers, in Graphviz's DOT language."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hvlike.autograd.context import DistributedContext, id_in_words
from hvlike.autograd.contexts import checked_id, contexts
from hvlike.autograd.local_graph import recv_of
from hvlike.errors import UsageError
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.agent.calls import rpc_async
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, in_context

_SHAPES = {"root": "doublecircle", "node": "box", "leaf": "ellipse", "send": "cds", "recv": "house"}


def draw(context_id: int, roots: Sequence[Tensor] = ()) -> str:
    """Draw the graph of a context on all workers that it has reached.

    The picture has a cluster for each worker, with what leads to the tensors that it has sent. Arrows show where
    gradients go, dashed ones go between workers. After a backward, the segments that each worker has run are listed
    above its cluster, and beside each message the segments that have used or made its gradients.

    Called on any worker that knows the context; blocks until all that it has reached have answered. Do not call it
    while a backward of the context runs.

    Args:
        context_id: From `context`.
        roots: Tensors of this worker that backward is called with; their graph is drawn too.

    Returns:
        The picture in Graphviz's DOT language: `dot -Tsvg` draws it.

    Raises:
        RuntimeError: "Could not find autograd context with id" where there is none.
        TypeError: If the id is not an int.
        UsageError: For roots that have no graph.
    """
    agent = current_agent()
    own = LocalPicture(agent, contexts.find(checked_id("draw", context_id)))
    for root in roots:
        if not isinstance(root, Tensor) or root.grad_fn is None:
            raise UsageError(f"draw: roots must be tensors that have a grad_fn, got {_describe(root)}.")
        own.add_root(root)
    clusters = [own.cluster()]
    known, ask = {agent.rank}, own.reached
    # Questions about a context do not belong to it.
    with in_context(NO_CONTEXT):
        while ask := ask - known:
            known |= ask
            futures = [rpc_async(rank, _answer, (context_id,)) for rank in sorted(ask)]
            answers = [answer for future in futures if (answer := future.wait()) is not None]
            clusters += [cluster for cluster, _ in answers]
            ask = {rank for _, reached in answers for rank in reached}
    return write_dot(f"autograd context {context_id}", clusters)


def _answer(context_id: int) -> tuple[Cluster, set[int]] | None:
    """Return this worker's cluster and which workers may have more; None where the context is not."""
    if context_id not in contexts.live():
        return None
    picture = LocalPicture(current_agent(), contexts.find(context_id))
    return picture.cluster(), picture.reached


@dataclass
class Cluster:
    """What one worker has of the picture."""

    rank: int
    label: str
    statements: list[str] = field(default_factory=list)  # Nodes and edges in DOT
    # By message: the node of what was sent, where its gradients arrive, or was received, where they leave.
    sends: dict[int, str] = field(default_factory=dict)
    recvs: dict[int, str] = field(default_factory=dict)
    nodes: int = 0

    def add_node(self, kind: str, text: str, segments: Sequence[int] = ()) -> str:
        """Add a node of a kind in _SHAPES, with the segments of the last backward in which its gradients moved."""
        name = f"w{self.rank}n{self.nodes}"
        self.nodes += 1
        style = ""
        if segments:
            text += f"\nsegment{'s' * (len(segments) > 1)} {', '.join(map(str, segments))}"
            style = ", style=filled, fillcolor=lightyellow"
        self.statements.append(f"{name} [shape={_SHAPES[kind]}, label={quote(text)}{style}];")
        return name


def write_dot(title: str, clusters: Iterable[Cluster]) -> str:
    """Return the picture of some clusters in DOT. Dashed edges connect both ends of a message."""
    ordered = sorted(clusters, key=lambda each: each.rank)
    lines = ["digraph autograd {", f"  label={quote(title)}; labelloc=t; rankdir=LR;"]
    lines.append('  node [fontname="Helvetica", fontsize=10];')
    for cluster in ordered:
        lines += [f"  subgraph cluster_{cluster.rank} {{", f"    label={quote(cluster.label)};"]
        lines += [f"    {statement}" for statement in cluster.statements]
        lines.append("  }")
    sends = {message: name for cluster in ordered for message, name in cluster.sends.items()}
    for cluster in ordered:
        for message, name in cluster.recvs.items():
            if message in sends:
                lines.append(f"  {name} -> {sends[message]} [style=dashed];")
    return "\n".join([*lines, "}", ""])


def quote(text: str) -> str:
    """Return the text as a DOT string. Line ends stay line ends."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class LocalPicture:
    """The cluster of this worker for a context, drawn piece by piece."""

    def __init__(self, agent: Agent, context: DistributedContext) -> None:
        self.reached = set(context.reached)  # The workers that may have more of the graph
        self._agent = agent
        self._context = context
        self._segments = list(enumerate(context.segments, 1))
        lines = [f"{self._name(agent.rank)} (rank {agent.rank})"]
        lines += [f"segment {number}: {each.kind}, nodes: {each.nodes}" for number, each in self._segments]
        self._cluster = Cluster(agent.rank, "\n".join(lines))
        self._names: dict[Any, str] = {}
        """Of torch's nodes. Their Python objects are equal only while something refers to them."""
        for send in list(context.sends.values()):
            text = f"to {self._name(send.rank)}: {id_in_words(send.id)}\n{send.about}"
            used = [number for number, segment in self._segments if send.id in segment.sends]
            name = self._cluster.sends[send.id] = self._cluster.add_node("send", text, used)
            self._follow(name, [edge.node for edge in send.edges])

    def add_root(self, tensor: Tensor) -> None:
        """Add a tensor that backward begins with, and what leads to it."""
        root = self._cluster.add_node("root", f"root\n{_describe(tensor)}")
        self._follow(root, [get_gradient_edge(tensor).node])

    def cluster(self) -> Cluster:
        """Return everything. Messages that nothing was made of stand alone."""
        for recv in list(self._context.recvs.values()):
            if recv.id not in self._cluster.recvs:
                self._add_recv(recv.id, recv.rank)
        return self._cluster

    def _follow(self, start: str, nodes: Sequence[Any]) -> None:
        todo: list[tuple[str, Any]] = [(start, node) for node in nodes]
        while todo:
            before, node = todo.pop()
            name = self._names.get(node)
            if name is None:
                name = self._names[node] = self._add_node(node)
                if recv_of(node) is None:
                    todo += [(name, child) for child, _ in node.next_functions if child is not None]
            self._cluster.statements.append(f"{before} -> {name};")

    def _add_node(self, node: Any) -> str:
        recv, leaf = recv_of(node), getattr(node, "variable", None)
        if recv is not None:
            return self._add_recv(recv.id, recv.rank)
        if isinstance(leaf, Tensor):
            done = "\nhas a gradient" if leaf in self._context.gradients else ""
            return self._cluster.add_node("leaf", f"leaf\n{_describe(leaf)}{done}")
        return self._cluster.add_node("node", node.name())

    def _add_recv(self, message: int, rank: int) -> str:
        made = [number for number, segment in self._segments if message in segment.recvs]
        name = self._cluster.add_node("recv", f"from {self._name(rank)}: {id_in_words(message)}", made)
        self._cluster.recvs[message] = name
        return name

    def _name(self, rank: int) -> str:
        return self._agent.workers[rank].name


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__

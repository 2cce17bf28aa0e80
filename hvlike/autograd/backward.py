"""backward(), and the table of all backwards that this worker takes part in.

A worker that has finished its part may still be asked about a message that was opened late. So a backward is
remembered until its root has ended it: later backwards of that root in the same context say so, or the release of the
context does.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.backward_pass import BackwardPass
from hvlike.autograd.context import DistributedContext, new_ids, rank_of_id
from hvlike.autograd.contexts import contexts
from hvlike.autograd.local_backward import Roots
from hvlike.autograd.messages import BACKWARD_MESSAGE, Heading, Wire, encode, heading_of, opens
from hvlike.autograd.protocol import BackwardMessage, Mode, Phase
from hvlike.errors import RpcError, UsageError, WrongTypeError
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.wire.autograd_hooks import NO_MESSAGE, unknown_context

_MODES = {mode.name.lower(): mode for mode in Mode}


@dataclass
class _OfContext:
    passes: dict[int, BackwardPass] = field(default_factory=dict)
    """By number."""
    oldest: dict[int, int] = field(default_factory=dict)
    """By root: its backwards with lower numbers are over."""


class BackwardTable:
    """The backwards of one session. Takes their messages."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._numbers = new_ids(agent.rank)
        self._lock = threading.Lock()
        self._by_context: dict[int, _OfContext] = {}
        agent.hear(BACKWARD_MESSAGE, self._take)
        agent.when_lost.append(self._lose)

    def begin(self, context: DistributedContext, roots: Roots, mode: Mode, retain_graph: bool) -> BackwardPass:
        with self._lock:
            number = next(self._numbers)
            passes = self._by_context.setdefault(context.id, _OfContext()).passes
            oldest = min((each for each in passes if rank_of_id(each) == self.agent.rank), default=number)
            heading = Heading(context.id, number, oldest, mode, retain_graph)
            begun = passes[number] = BackwardPass(self, context, heading, roots)
        return begun

    def forget(self, ended: BackwardPass) -> None:
        """Nothing more comes of a backward. From any thread."""
        heading = ended.heading
        ended.context.disengage(ended)
        with self._lock:
            known = self._by_context.get(heading.context)
            if known is not None:
                known.passes.pop(heading.number, None)
                if not known.passes:
                    del self._by_context[heading.context]

    def end(self) -> None:
        for each in self._all():
            each.fail("RPC has been shut down while this was in flight.")
        self._by_context.clear()

    def _take(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        with self._lock:
            known = self._by_context.get(wire[0])
            found = known.passes.get(wire[1]) if known is not None else None
        if found is None and opens(wire):
            found = self._open(heading_of(wire), source)
        if found is not None:
            found.receive(source, wire, storages)

    def _open(self, heading: Heading, source: int) -> BackwardPass | None:
        """Add a backward that is new to this worker. None where it is over."""
        root = rank_of_id(heading.number)
        if root == self.agent.rank:
            return None
        # The message that is to make the context known here may still wait for a thread.
        contexts.came((heading.context, NO_MESSAGE), source, ())
        context = contexts.get(heading.context)
        if context is None:
            answer = BackwardMessage(error=f"Error on Node {self.agent.rank}: {unknown_context(heading.context)}")
            self.agent.post(source, BACKWARD_MESSAGE, *encode(heading, answer, source))
            return None
        with self._lock:
            known = self._by_context.setdefault(heading.context, _OfContext())
            if heading.number < known.oldest.get(root, 0):
                return None
            known.oldest[root] = heading.oldest
            over = [known.passes[each] for each in known.passes if rank_of_id(each) == root and each < heading.oldest]
            opened = known.passes[heading.number] = BackwardPass(self, context, heading, ())
        for each in over:
            self.forget(each)
        return opened

    def _lose(self, rank: int, error: Exception) -> None:
        for each in self._all():
            each.lost(rank, str(error))

    def _all(self) -> list[BackwardPass]:
        with self._lock:
            return [each for known in self._by_context.values() for each in known.passes.values()]


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False, mode: str = "safe") -> None:
    """Compute the gradients of all leaves that the roots depend on, on all workers, into the context.

    `get_gradients` returns the gradients; `.grad` is neither read nor written. Called on one worker, of any that the
    context has reached; several backwards may run at a time. Blocks until the gradients are final on all workers.

    Args:
        context_id: From `context`.
        roots: Tensors of one element each that require grad and are no leaves. Their gradients are summed.
        retain_graph: As in torch: without it the graph is freed, on all workers.
        mode: Which messages of the context take part:

            - "safe": All. Those that the roots do not depend on are told so. Best where most results are used.
            - "smart": Those that the roots depend on, found in a first phase. Best where many results are unused.
            - "fast": As torch's: every message has to be used, else a RuntimeError names the call.

    Raises:
        TypeError: For arguments of wrong types.
        UsageError: For an unknown mode.
        RuntimeError: For tensors that cannot be roots; "Could not find autograd context with id"; "Error on Node
            <rank>: ..." for what fails in the graph, with one such prefix for each worker on the way to this one;
            after rpc_timeout seconds of RPC. The context can be used again.

    Example:
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (weight, x)).sum()
        ...     autograd.backward(context_id, [loss])
        ...     gradient = autograd.get_gradients(context_id)[weight]

    Source: torch.distributed.autograd.backward; the modes: "Distributed Autograd Design" in torch's notes.
    """
    number, tensors = _checked(context_id, roots, retain_graph)
    if mode not in _MODES:
        raise UsageError(f"backward: mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}.")
    agent = current_agent()
    context = contexts.find(number)
    edges = _edges(tensors)
    table: BackwardTable | None = contexts.backwards
    if table is None:
        raise RpcError("RPC has been shut down.")
    begun = table.begin(context, edges, _MODES[mode], bool(retain_graph))
    begun.complete(agent.timeout or None)
    if begun.state.phase is Phase.FAILED:
        cause, begun.cause = begun.cause, None
        try:
            if cause is not None and not isinstance(cause, Exception):
                raise cause
            raise RpcError(begun.state.error) from cause
        finally:
            # Its traceback leads here: a cycle would keep all tensors until the next garbage collection.
            del cause


def _checked(context_id: Any, roots: Any, retain_graph: Any) -> tuple[int, list[Tensor]]:
    """Return the arguments, if they are of the right types. Raises: TypeError."""
    wrong = ""
    tensors: list[Any] = []
    if isinstance(roots, Tensor | str) or not isinstance(roots, Iterable):
        wrong = f"roots={type(roots).__name__}"
    else:
        tensors = list(roots)
        others = [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]
        wrong = f"a {others[0]} among the roots" if others else ""
    if isinstance(context_id, bool | float) or not hasattr(context_id, "__index__"):
        wrong = f"context_id={context_id!r}"
    if not isinstance(retain_graph, bool | int):
        wrong = f"retain_graph={retain_graph!r}"
    if wrong:
        raise WrongTypeError(
            "backward(): incompatible function arguments: it takes context_id, an int; roots, a sequence of tensors; "
            f"retain_graph, a bool; mode, a str. Got {wrong}."
        )
    return operator.index(context_id), tensors


def _edges(tensors: list[Tensor]) -> Roots:
    """Return where backward begins, and with what. Raises: RuntimeError for tensors that cannot be roots."""
    if not tensors:
        raise RpcError("No tensors provided for gradient computation.")
    edges = []
    for place, root in enumerate(tensors):
        node = root.grad_fn
        what = f"root {place} of backward (shape {list(root.shape)}, {root.dtype})"
        if not root.requires_grad:
            raise RpcError(f"requires_grad not set on {what}.")
        if root.numel() != 1:
            raise RpcError(f"{what} is not a scalar, all roots need to be scalar: sum it, or take its mean.")
        if node is None:
            raise RpcError(f"{what} does not have a valid gradient function: it is a leaf, nothing led to it.")
        edges.append((GradientEdge(node, root.output_nr), torch.ones_like(root)))
    return edges


contexts.new_backwards = BackwardTable
contexts.run_backward = backward

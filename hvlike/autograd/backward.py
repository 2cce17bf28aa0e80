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

from hvlike.autograd.backward_pass import BackwardPass, Roots
from hvlike.autograd.context import DistributedContext
from hvlike.autograd.contexts import Contexts, IdGenerator, contexts, rank_of_id
from hvlike.autograd.messages import BACKWARD_MESSAGE, Heading, Wire, encode, heading_of, opens
from hvlike.autograd.protocol import BackwardMessage, Mode, Phase
from hvlike.errors import RpcError, UsageError, WrongTypeError
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.wire.autograd_hooks import NO_MESSAGE, unknown_context


@dataclass
class _OfContext:
    """The backwards of one context."""

    runs: dict[int, BackwardPass] = field(default_factory=dict)
    """By number."""
    oldest: dict[int, int] = field(default_factory=dict)
    """By root: those of it with lower numbers are over."""


class ActivePasses:
    """Those of one session."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        """Take letters from now on."""
        self.agent = agent
        self._contexts = contexts
        self._numbers = IdGenerator(agent.rank)
        self._lock = threading.Lock()
        self._known: dict[int, _OfContext] = {}
        agent.take(BACKWARD_MESSAGE, self._take)
        agent.when_lost.append(self._lose)

    def begin(self, context: DistributedContext, roots: Roots, mode: Mode, retain_graph: bool) -> BackwardPass:
        """A new one whose root is this worker."""
        with self._lock:
            number = self._numbers.new()
            runs = self._known.setdefault(context.id, _OfContext()).runs
            oldest = min((each for each in runs if rank_of_id(each) == self.agent.rank), default=number)
            heading = Heading(context.id, number, oldest, mode, retain_graph)
            run = runs[number] = BackwardPass(self, context, heading, roots)
        return run

    def forget(self, run: BackwardPass) -> None:
        """Nothing more comes of it. From any thread."""
        heading = run.heading
        run.context.disengage(heading.number)
        with self._lock:
            known = self._known.get(heading.context)
            if known is not None:
                known.runs.pop(heading.number, None)
                if not known.runs:
                    del self._known[heading.context]

    def is_live(self, context: DistributedContext) -> bool:
        """Whether the context has not been released."""
        return self._find(context.id) is context

    def end(self, error: str) -> None:
        """The session is over."""
        for run in self._all():
            run.fail(error)
        self._known.clear()

    # -- in the loop --------------------------------------------------------------------------

    def _take(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        with self._lock:
            known = self._known.get(wire[0])
            run = known.runs.get(wire[1]) if known is not None else None
        if run is None and opens(wire):
            run = self._open(heading_of(wire), source)
        if run is not None:
            run.hear(source, wire, storages)

    def _open(self, heading: Heading, source: int) -> BackwardPass | None:
        """Remember a backward that this worker has not heard of; None where it is over."""
        root = rank_of_id(heading.number)
        if root == self.agent.rank:
            return None
        # The message that is to make the context known here may still wait for a thread.
        self._contexts.came((heading.context, NO_MESSAGE), source, ())
        context = self._find(heading.context)
        if context is None:
            answer = BackwardMessage(error=f"Error on Node {self.agent.rank}: {unknown_context(heading.context)}")
            self.agent.post(source, BACKWARD_MESSAGE, *encode(heading, answer, source))
            return None
        with self._lock:
            known = self._known.setdefault(heading.context, _OfContext())
            if heading.number < known.oldest.get(root, 0):
                return None
            known.oldest[root] = heading.oldest
            over = [
                each for number, each in known.runs.items() if rank_of_id(number) == root and number < heading.oldest
            ]
            run = known.runs[heading.number] = BackwardPass(self, context, heading, ())
        for each in over:
            self.forget(each)
        return run

    def _find(self, context: int) -> DistributedContext | None:
        try:
            return self._contexts.find(context)
        except RuntimeError:
            return None

    def _lose(self, rank: int, error: Exception) -> None:
        for run in self._all():
            run.lost(rank, str(error))

    def _all(self) -> list[BackwardPass]:
        with self._lock:
            return [run for known in self._known.values() for run in known.runs.values()]


_MODES = {mode.name.lower(): mode for mode in Mode}


class _Process:
    runs: ActivePasses | None = None


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False, mode: str = "safe") -> None:
    """Compute the gradients of all leaves that the roots depend on, on all workers, into the context.

    context_id: from `context`. roots: tensors of one element each that require grad and are no leaves; their gradients
    are summed. retain_graph: as in torch; without it the graph is freed on all workers. mode: what of the messages of
    this context takes part:
        "safe"   all, and those that the roots do not depend on are told so: best where most results are used
        "smart"  those that the roots depend on, which a first phase finds out: best where many results are unused
        "fast"   as torch's: every message has to be used, else RuntimeError that names the call
    Local: called on one worker, of any that the context has reached; blocks until the gradients are final on all.
    get_gradients returns them; `.grad` is neither read nor written. Several may run at a time.
    Raises: TypeError, UsageError or RuntimeError for wrong arguments; RuntimeError "Could not find autograd context
        with id"; RuntimeError "Error on Node <rank>: ..." for what goes wrong in the graph, with one such prefix for
        each worker on the way to here; after rpc_timeout seconds of RPC. The context can be used again.
    Source: torch.distributed.autograd.backward; modes: "Distributed Autograd Design" in torch's notes.
    """
    number, tensors = _checked(context_id, roots, retain_graph)
    if mode not in _MODES:
        raise UsageError(f"backward: mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}.")
    agent = current_agent()
    context = contexts.find(number)
    edges = _edges(tensors)
    runs = _Process.runs
    if runs is None:
        raise RpcError("RPC has been shut down.")
    run = runs.begin(context, edges, _MODES[mode], bool(retain_graph))
    run.complete(agent.timeout or None)
    if run.part.state is Phase.FAILED:
        cause, run.cause = run.cause, None
        try:
            if cause is not None and not isinstance(cause, Exception):
                raise cause
            raise RpcError(run.part.error) from cause
        finally:
            # Its traceback leads here: a cycle would keep all tensors until the garbage collector comes.
            del cause


def _checked(context_id: Any, roots: Any, retain_graph: Any) -> tuple[int, list[Tensor]]:
    """The arguments, if they are of the right types. Raises: TypeError."""
    wrong = ""
    tensors: list[Any] = []
    if isinstance(roots, Tensor | str) or not isinstance(roots, Iterable):
        wrong = f"roots={type(roots).__name__}"
    else:
        tensors = list(roots)
        strange = [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]
        wrong = f"a {strange[0]} among the roots" if strange else ""
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
    """Where backward begins, and with what. Raises: RuntimeError for tensors that cannot be roots."""
    if not tensors:
        raise RpcError("No tensors provided for gradient computation.")
    edges = []
    for place, root in enumerate(tensors):
        node = root.grad_fn
        if node is None or root.numel() != 1:
            raise _no_root(place, root)
        edges.append((GradientEdge(node, root.output_nr), torch.ones_like(root)))
    return edges


def _no_root(place: int, root: Tensor) -> RuntimeError:
    """Why a tensor cannot be a root."""
    what = f"root {place} of backward (shape {list(root.shape)}, {root.dtype})"
    if not root.requires_grad:
        return RpcError(f"requires_grad not set on {what}.")
    if root.numel() != 1:
        return RpcError(f"{what} is not a scalar, all roots need to be scalar: sum it, or take its mean.")
    return RpcError(f"{what} does not have a valid gradient function: it is a leaf, nothing led to it.")


def _begin_session(agent: Agent) -> None:
    _Process.runs = ActivePasses(agent, contexts)


def _end_session() -> None:
    runs, _Process.runs = _Process.runs, None
    if runs is not None:
        runs.end("RPC has been shut down while this was in flight.")


contexts.when_session_begins.append(_begin_session)
contexts.when_session_ends.append(_end_session)
contexts.run_backward = backward

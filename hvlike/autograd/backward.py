"""backward(): gradients of a graph that spreads over workers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hvlike.autograd.contexts import contexts
from hvlike.autograd.local_machine import Roots
from hvlike.autograd.protocol import Mode, State
from hvlike.autograd.runs import Runs
from hvlike.errors import RpcError, UsageError, WrongTypeError
from hvlike.rpc.agent import Agent, current

_MODES = {mode.name.lower(): mode for mode in Mode}


class _Process:
    runs: Runs | None = None


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
    agent = current()
    context = contexts.find(number)
    edges = _edges(tensors)
    runs = _Process.runs
    if runs is None:
        raise RpcError("RPC has been shut down.")
    run = runs.begin(context, edges, _MODES[mode], bool(retain_graph))
    run.complete(agent.timeout or None)
    if run.part.state is State.FAILED:
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
    _Process.runs = Runs(agent, contexts)


def _end_session() -> None:
    runs, _Process.runs = _Process.runs, None
    if runs is not None:
        runs.end("RPC has been shut down while this was in flight.")


contexts.when_session_begins.append(_begin_session)
contexts.when_session_ends.append(_end_session)
contexts.run_backward = backward

"""RRef.backward: as far as ordinary autograd goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hvlike.rpc.rref import RRef


NO_CONTEXT = -1


def backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """See RRef.backward."""
    if not rref.is_owner():
        if context_id == NO_CONTEXT:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        raise _no_contexts(context_id)
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id != NO_CONTEXT:
        raise _no_contexts(context_id)
    torch.autograd.backward(value, retain_graph=retain_graph)


def _no_contexts(context_id: int) -> RuntimeError:
    return RuntimeError(
        f"Could not find autograd context with id: {context_id}. Contexts come with distributed autograd "
        "(hvlike.autograd), which this version lacks; without an id, backward() on the owner is ordinary autograd."
    )

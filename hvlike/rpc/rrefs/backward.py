"""RRef.backward: from a tensor that is the value of an RRef, on its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hvlike.errors import RpcError
from hvlike.rpc import calls, contexts
from hvlike.rpc.contexts import NO_CONTEXT

if TYPE_CHECKING:
    from hvlike.rpc.rref import RRef


def backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """See RRef.backward."""
    if not rref.is_owner():
        if context_id == NO_CONTEXT:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        calls.rpc_sync(rref.owner(), backward, (rref, context_id, retain_graph))
        return
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id == NO_CONTEXT:
        torch.autograd.backward(value, retain_graph=retain_graph)
    else:
        contexts.installed().backward(context_id, [value], retain_graph)

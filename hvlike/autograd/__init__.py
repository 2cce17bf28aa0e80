"""Distributed autograd over hvlike.rpc: the names of torch.distributed.autograd."""

from hvlike.autograd.backward import backward
from hvlike.autograd.contexts import context, get_gradients
from hvlike.autograd.graphviz import draw
from hvlike.untraced import keep_untraced

__all__ = ["backward", "context", "draw", "get_gradients"]

keep_untraced(globals())

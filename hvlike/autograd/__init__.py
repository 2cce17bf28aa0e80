"""Distributed autograd over hvlike.rpc: torch.distributed.autograd's names."""

from hvlike.autograd.contexts import context, get_gradients

__all__ = ["context", "get_gradients"]

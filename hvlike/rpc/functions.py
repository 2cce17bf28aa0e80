"""The decorator that programs take from `rpc.functions`."""

from hvlike.rpc.agent.futures import async_execution

__all__ = ["async_execution"]

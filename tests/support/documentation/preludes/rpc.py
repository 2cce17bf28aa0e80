"""What docs/rpc.md leaves to the reader."""

import torch

import hvlike as hvd
from hvlike import rpc
from hvlike.errors import WorkerLostError

blocks_before = globals().get("blocks_before", -1) + 1
if blocks_before and not rpc.api._is_current_rpc_agent_set():
    rpc.init_rpc(f"worker{hvd.rank()}")


def work() -> None:
    """What a program does with its workers."""

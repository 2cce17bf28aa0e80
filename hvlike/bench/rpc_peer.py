"""One of the two processes of torch.distributed.rpc over TensorPipe that bench rpc and bench autograd compare with.

hvlike/bench/rpc_session.py starts and stops it; its arguments are its rank, the file where both meet, and the file
descriptor of its socket. Rank 0 answers requests for work; the main thread of rank 1 sleeps until the benchmark ends.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from typing import Any

import torch.distributed.autograd
import torch.distributed.rpc

from hvlike.bench.harness.processes import JsonSocket, Message
from hvlike.bench.rpc_work import Step, from_message
from hvlike.errors import HvlikeError


def main(rank: int, meeting: str, descriptor: int) -> None:
    """Join the pair, answer requests, and leave with the other process."""
    # A stopped process of a group of its own is ended by the kernel when its parent goes, also by kill -9.
    os.setpgid(0, 0)
    connected = JsonSocket(socket.socket(fileno=descriptor))
    rpc: Any = torch.distributed.rpc
    # torch uses deprecated calls itself.
    warnings.simplefilter("ignore")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"peer{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    connected.send({"rank": rank})
    while (request := connected.receive()) is not None:
        connected.send(answer(request))
    rpc.shutdown()


def answer(request: Message) -> Message:
    """Do some work and say what it has measured, or what went wrong."""
    try:
        work = from_message(request)
        rpc, autograd = torch.distributed.rpc, torch.distributed.autograd
        return {"samples": work.measure(rpc, autograd) if isinstance(work, Step) else work.measure(rpc)}
    except (HvlikeError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

"""One alltoall by messages: a pipeline of sends and one of receives, each with a few messages in flight.

Four ranks, seen from rank 0; every pair cut into messages 0, 1, ...:

    send       0 to 1, 0 to 2, 0 to 3, 1 to 1, 1 to 2, ...
    receive    0 from 3, 0 from 2, 0 from 1, 1 from 3, ...

The message of step s goes from r to r + s, so both its ends have it at the same place (message number, step) of their
pipelines: the earliest one that waits, over all ranks, can always move. Everything is sent and received in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.network.progress import MessagePipeline
from hvlike.transport.memory.dtypes import raw_view

MESSAGE_BYTES = 8 << 20
"""Large enough that the cost of a message does not count, small enough that all peers get their share of the link."""
WINDOW = 16  # Messages in flight in each direction
_TAG = 3


def pairwise_alltoall(
    comm: Any, byte: Any, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> list[MessagePipeline]:
    """The messages of this rank to and from others; sends, receives: flat tensors of bytes, one per rank."""
    rank, size = comm.Get_rank(), comm.Get_size()

    def pipeline(call: Callable[..., Any], tensors: Sequence[torch.Tensor], shift: int) -> MessagePipeline:
        peers = [(rank + shift * step) % size for step in range(1, size)]
        views = {peer: raw_view(tensors[peer]) for peer in peers}
        longest = max((len(view) for view in views.values()), default=0)

        def start(first: int, peer: int) -> Any:
            return call([views[peer][first : first + MESSAGE_BYTES], byte], peer, _TAG)

        firsts = range(0, longest, MESSAGE_BYTES)
        return MessagePipeline(
            ((first, peer) for first in firsts for peer in peers if first < len(views[peer])), WINDOW, start
        )

    return [pipeline(comm.Irecv, receives, -1), pipeline(comm.Isend, sends, 1)]

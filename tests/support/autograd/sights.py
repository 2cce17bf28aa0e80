"""What tests ask other workers about contexts, and wait for."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from support.rpc.doors import pass_door, passes

import hvlike.rpc
from hvlike.autograd.contexts import contexts
from hvlike.autograd.local_graph import recv_of
from hvlike.rpc.agent.agent import current_agent as agent
from hvlike.rpc.functions import async_execution
from hvlike.rpc.wire.autograd_hooks import this_thread

_SECONDS = 60.0


def here() -> int:
    """The context of the thread that runs this."""
    return this_thread.context


def is_known(context: int) -> bool:
    """Whether this worker has the context."""
    return context in contexts.live()


def sends(context: int) -> dict[int, tuple[int, int]]:
    """What was sent from here in a context: to whom and with how many tensors that require grad, by message."""
    return {number: (send.rank, len(send.edges)) for number, send in contexts.find(context).sends.items()}


def recvs(context: int) -> dict[int, tuple[int, int]]:
    """What has come here in a context: from whom and with how many tensors that require grad, by message."""
    return {number: (recv.rank, recv.count) for number, recv in contexts.find(context).recvs.items()}


def here_and_there(to: int) -> tuple[int, int]:
    """The context here, and that of a call from here to another worker."""
    return this_thread.context, hvlike.rpc.rpc_sync(to, here)


def is_answered(door: str, source: int) -> bool:
    """Whether somebody has gone through the door on this worker, and the answer to rank `source` has been sent."""
    waiting = [request for request in agent().open.values() if request.source == source]
    return passes(door) == 1 and pass_door.__qualname__ not in [request.about for request in waiting]


def answers(context: int, request: int) -> list[int]:
    """The messages of a context by which this worker has answered calls of `pass_door`, the request's own left out."""
    found = contexts.find(context).sends.values()
    return [send.id for send in found if send.about == pass_door.__qualname__ and send.id != request]


@async_execution
def here_and_later(to: int) -> Any:
    """The context here, that of a call, and that of the call's callback here, where another call is made."""
    first = this_thread.context
    return hvlike.rpc.rpc_async(to, here).then(
        lambda future: (first, future.wait(), this_thread.context, hvlike.rpc.rpc_sync(to, here))
    )


def is_attached(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what a message has brought in a context."""
    return recv_of(tensor.grad_fn) is not None


def in_another_thread(function: Callable[[], Any]) -> Any:
    """What the function returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)

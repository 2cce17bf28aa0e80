"""A session of RPC for each test that asks for one, and no context left behind by any."""

from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def rpc(hvd: ModuleType) -> Iterator[ModuleType]:
    """hvlike.rpc in a session among all ranks, named worker0, worker1, ...; what is left over is an error."""
    from hvlike import rpc
    from hvlike.autograd.contexts import contexts

    left: list[int] = []
    rpc.api._set_leak_checking(True)
    rpc.init_rpc(f"worker{hvd.rank()}")
    yield rpc
    if rpc._is_current_rpc_agent_set():
        end = contexts.backwards.end

        def look() -> None:
            left.extend(contexts.live())
            end()

        # When the workers have parted, all notices of releases have come.
        contexts.backwards.end = look
        rpc.shutdown(timeout=60)
    assert not left, f"contexts that nobody has released: {left}"


@pytest.fixture
def autograd(rpc: ModuleType) -> ModuleType:
    """hvlike.autograd in a session of RPC."""
    from hvlike import autograd

    return autograd


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())

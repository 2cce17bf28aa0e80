"""A session of RPC for each test that asks for one."""

from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def rpc(hvd: ModuleType) -> Iterator[ModuleType]:
    """hvlike.rpc in a session among all ranks, named worker0, worker1, ...; a value that is left over is an error."""
    from hvlike import rpc

    rpc.api._set_leak_checking(True)
    rpc.init_rpc(f"worker{hvd.rank()}")
    yield rpc
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(timeout=60)


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def third(hvd: ModuleType, peer: int) -> int:
    """The rank that the peer calls."""
    return (peer + 1) % int(hvd.size())


@pytest.fixture
def name(hvd: ModuleType, request: pytest.FixtureRequest) -> str:
    """A door, or a promise, that only this rank uses in this test."""
    return f"{request.node.name} {hvd.rank()}"

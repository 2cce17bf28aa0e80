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

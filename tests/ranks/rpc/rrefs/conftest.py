"""Every test of RRefs begins and ends with empty tables on all workers, without help from shutdown."""

import gc
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from hvlike.rpc.rrefs.session import current_session, live_rrefs

_SECONDS = 20.0
_PATIENCE_SECONDS = 0.05
"""A collection of garbage takes as long as several tests; it is for those that leave cycles behind."""


@pytest.fixture(scope="module")
def rpc(hvd: ModuleType) -> Iterator[ModuleType]:
    """hvlike.rpc in one session for all tests of a file: each test is checked for what it leaves by itself."""
    from hvlike import rpc

    rpc.api._set_leak_checking(True)
    rpc.init_rpc(f"worker{hvd.rank()}")
    yield rpc
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(timeout=60)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[None]:
    if "rpc" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("rpc")
    hvd.barrier()
    yield
    # What other ranks hold of this one's values is theirs to let go first.
    hvd.barrier()
    deadline = time.monotonic() + _SECONDS
    collect_at = time.monotonic() + _PATIENCE_SECONDS
    while not is_empty() and time.monotonic() < deadline:
        time.sleep(0.001)
        if time.monotonic() > collect_at:
            gc.collect()
            collect_at = deadline
    left = [str(each) for each in live_rrefs()]
    empty = is_empty()
    hvd.barrier()
    assert left == []
    assert empty


def is_empty() -> bool:
    """Whether no table of this worker has anything in it."""
    return set(current_session().debug_info().values()) == {"0"}

"""Every test of RRefs begins and ends with empty tables on all workers, without help from shutdown."""

import gc
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from hvlike.rpc import rrefs

_SECONDS = 20.0


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def name(hvd: ModuleType, request: pytest.FixtureRequest) -> str:
    """A door at which only calls of this rank in this test wait."""
    return f"{request.node.name} {hvd.rank()}"


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
    gc.collect()
    deadline = time.monotonic() + _SECONDS
    while any(count != "0" for count in rrefs.debug_info().values()) and time.monotonic() < deadline:
        time.sleep(0.001)
    left = [str(each) for each in rrefs.live()]
    counts = rrefs.debug_info()
    hvd.barrier()
    assert left == []
    assert set(counts.values()) == {"0"}

"""The ranks of this machine grouped into pretended nodes, so that the network and hierarchical backends run too."""

import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.session.context import current


@pytest.fixture(params=[None, 1, 2], ids=["shared", "network", "hierarchical"], scope="module")
def ranks_per_node(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[int | None]:
    """hvlike started anew with so many ranks on each pretended node."""
    hvd.shutdown()
    before = os.environ.pop("HVLIKE_RANKS_PER_NODE", None)
    if request.param is not None:
        os.environ["HVLIKE_RANKS_PER_NODE"] = str(request.param)
    hvd.init()
    yield request.param
    hvd.shutdown()
    os.environ.pop("HVLIKE_RANKS_PER_NODE", None)
    if before is not None:
        os.environ["HVLIKE_RANKS_PER_NODE"] = before
    hvd.init()


@pytest.fixture
def reaching(hvd: ModuleType) -> Iterator[bool]:
    """Whether the ranks of this job can reach each other; if so they do from the smallest work on."""
    backend = current().find_set(None, "test").queues.first.backend
    if not isinstance(backend, SharedBackend) or not backend.memory.ranks:
        yield False
        return
    before, backend.memory.least_bytes = backend.memory.least_bytes, 1
    yield True
    backend.memory.least_bytes = before

"""The ranks of this machine grouped into pretended nodes, so that the network and hierarchical backends run too."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from support.pretended_nodes import WAYS, going

from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.session.context import current


@pytest.fixture(params=["shared", "network", "leader", "waves"], scope="module")
def ranks_per_node(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[int | None]:
    """hvlike started anew with so many ranks on each pretended node."""
    with going(hvd, WAYS[request.param]):
        yield WAYS[request.param].ranks_per_node


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

"""The ranks of this machine grouped into pretended nodes, so that the network and hierarchical backends run too."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from support.pretended_nodes import nodes_of

from hvlike.backends import hierarchical
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.session.context import current

WAYS = {"shared": (None, None), "network": (1, None), "leader": (2, 1 << 40), "waves": (2, 0)}


@pytest.fixture(params=list(WAYS), scope="module")
def ranks_per_node(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[int | None]:
    """hvlike started anew with so many ranks on each pretended node; where these are several, the first of them crosses
    for all, or all cross in waves.
    """
    ranks, leader_bytes = WAYS[request.param]
    with pytest.MonkeyPatch.context() as patch, nodes_of(hvd, ranks):
        if leader_bytes is not None:
            for name in ("LEADER_BYTES", "CROWDED_LEADER_BYTES"):
                patch.setattr(hierarchical, name, leader_bytes)
        yield ranks


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

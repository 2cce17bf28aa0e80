"""The ranks of this machine grouped into pretended nodes, and the ways that collectives can be done."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest


@contextmanager
def nodes_of(hvd: ModuleType, ranks: int | None) -> Iterator[None]:
    """hvlike started anew with so many ranks on each pretended node; None: with the node that there is."""
    hvd.shutdown()
    before = os.environ.pop("HVLIKE_RANKS_PER_NODE", None)
    if ranks is not None:
        os.environ["HVLIKE_RANKS_PER_NODE"] = str(ranks)
    hvd.init()
    yield
    hvd.shutdown()
    os.environ.pop("HVLIKE_RANKS_PER_NODE", None)
    if before is not None:
        os.environ["HVLIKE_RANKS_PER_NODE"] = before
    hvd.init()


@dataclass(frozen=True)
class Way:
    """How many ranks a pretended node has, and which limits are others than those of a real job."""

    ranks_per_node: int | None
    leader_bytes: int | None = None
    """Of several nodes of several ranks: up to so many bytes the first rank of a node crosses for all, and beyond
    that all cross in waves.
    """
    small: bool = False
    """Whether few bytes are many messages, shards or waves."""
    reaching: bool = False
    """Whether ranks that can reach each other's memory do so from the first byte on."""


WAYS = {
    "shared": Way(None),
    "reaching": Way(None, reaching=True),
    "network": Way(1),
    "packets": Way(1, small=True),
    "leader": Way(2, leader_bytes=1 << 40),
    "waves": Way(2, leader_bytes=0, small=True),
}

SMALL = {
    "pairwise_reduction.SHORT_BYTES": 1024,
    "pairwise_reduction.FIRST_BYTES": 512,
    "pairwise_reduction.PACKED_BYTES": 512,
    "pairwise_reduction.LARGEST_PACKET": 4096,
    "network.ALLTOALL_BYTES": 50_000,
    "network.ALLTOALL_WINDOW": 3,
}


@contextmanager
def going(hvd: ModuleType, way: Way) -> Iterator[None]:
    """hvlike started anew, so that its collectives go this way."""
    from hvlike.backends.shared_memory.shared_backend import SharedBackend
    from hvlike.collectives.session.context import current

    with pytest.MonkeyPatch.context() as patch, nodes_of(hvd, way.ranks_per_node):
        if way.leader_bytes is not None:
            for name in ("LEADER_BYTES", "CROWDED_LEADER_BYTES"):
                patch.setattr(f"hvlike.backends.hierarchical.{name}", way.leader_bytes)
        if way.small:
            patch.setattr("hvlike.backends.waves.SHARD_BYTES", 32_768)
            for name, value in SMALL.items():
                patch.setattr(f"hvlike.backends.network.{name}", value)
        backend = current().find_set(None, "test").queues.first.backend
        if way.reaching and isinstance(backend, SharedBackend):
            backend.memory.least_bytes = 1
        yield

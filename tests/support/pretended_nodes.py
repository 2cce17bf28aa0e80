"""The ranks of this machine grouped into pretended nodes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


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

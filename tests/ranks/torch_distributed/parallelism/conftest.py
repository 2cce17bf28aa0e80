"""torch.distributed over hvlike, started anew for each file."""

import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest

# "gloo": what torch's own backend makes of these tests.
BACKEND = os.environ.get("HVLIKE_TEST_TORCH_BACKEND", "hvlike")


def pytest_itemcollected(item: pytest.Item) -> None:
    """What torch warns about in its own code is not ours to change."""
    item.add_marker(pytest.mark.filterwarnings("ignore:::torch.*"))


@pytest.fixture(scope="module", autouse=True)
def process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """All ranks."""
    import torch.distributed as dist

    more = {}
    if BACKEND == "gloo":
        rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
        store = dist.FileStore(f"/tmp/hvlike-gloo-{os.getppid()}-{request.node.name}", size)
        more = {"store": store, "rank": rank, "world_size": size}
    elif not hasattr(dist.Backend, "HVLIKE"):
        import hvlike
        from hvlike.torch_distributed.process_group import create

        hvlike.init()
        dist.Backend.register_backend("hvlike", create, extended_api=True, devices=["cpu", "cuda"])
    if BACKEND == "hvlike" and "hvlike.torch_distributed.autoload" not in sys.modules:
        import hvlike

        more = {"store": dist.HashStore(), "rank": hvlike.rank(), "world_size": hvlike.size()}
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60), **more)
    yield
    dist.destroy_process_group()

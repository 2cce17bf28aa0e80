"""torch.distributed for what others build upon it, started anew for each file."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.torch_distributed.backend import start


def pytest_itemcollected(item: pytest.Item) -> None:
    """What torch warns about in its own code is not ours to change."""
    item.add_marker(pytest.mark.filterwarnings("ignore:::torch.*"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """All ranks."""
    start(timedelta(seconds=60))
    yield
    dist.destroy_process_group()

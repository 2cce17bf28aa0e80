"""torch.distributed, started for each file of tests."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, start

from hvlike.torch_distributed.autoload import OLDEST_TORCH

IS_TOO_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH


@pytest.fixture(scope="module")
def started() -> Iterator[World]:
    """The default group, once for a file."""
    start()
    rank, size = dist.get_rank(), dist.get_world_size()
    yield World(rank, size, (rank + 1) % size)
    dist.destroy_process_group()


@pytest.fixture
def world(started: World) -> World:
    """This rank in the default group."""
    return started


# Old names, which all programs of today use and torch 2.13 replaces; and that sparse tensors could be checked.
IGNORED = ("ignore:`torch.distributed.*deprecated:FutureWarning", "ignore:Sparse invariant checks:UserWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let tests call functions by their old names."""
    item.add_marker(pytest.mark.filterwarnings(*IGNORED))
    item.add_marker(pytest.mark.skipif(IS_TOO_OLD, reason="the backend needs a newer torch"))

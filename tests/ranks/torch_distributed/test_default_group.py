"""hvlike's own way to start torch.distributed, for programs that use both: once, and never over another backend."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hvlike.errors import UsageError
from hvlike.integrations.torch_distributed import init_process_group


@pytest.fixture
def ranks(hvd: ModuleType) -> Iterator[tuple[int, int]]:
    """torch.distributed, started over hvlike: this rank, and how many there are."""
    init_process_group()
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def test_it_is_the_default_group_and_starts_once(ranks: tuple[int, int], hvd: ModuleType) -> None:
    init_process_group()
    assert (hvd.rank(), hvd.size()) == ranks
    assert dist.get_backend() == "hvlike"


def test_another_backend_is_not_replaced(hvd: ModuleType) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="'gloo'"):
            init_process_group()
    finally:
        dist.destroy_process_group()

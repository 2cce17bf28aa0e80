"""torch.distributed over hvlike: each collective has the values that torch documents, for tensors and for objects."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from hvlike.errors import UsageError
from hvlike.integrations.torch_distributed import init_process_group

# Old names, which many programs use and torch 2.10 has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*deprecated:FutureWarning")


@pytest.fixture
def ranks(hvd: ModuleType) -> Iterator[tuple[int, int]]:
    """torch.distributed, started over hvlike: this rank, and how many there are."""
    init_process_group()
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def mine(rank: int) -> Tensor:
    """A tensor of two rows that says whose it is."""
    return torch.arange(6.0).view(2, 3) + 10 * rank


def test_it_is_the_default_group_and_starts_once(ranks: tuple[int, int], hvd: ModuleType) -> None:
    init_process_group()
    assert (hvd.rank(), hvd.size()) == ranks
    assert dist.get_backend() == "hvlike"


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, lambda all_ranks: all_ranks.sum(0)),
        (dist.ReduceOp.AVG, lambda all_ranks: all_ranks.mean(0)),
        (dist.ReduceOp.MIN, lambda all_ranks: all_ranks.amin(0)),
        (dist.ReduceOp.MAX, lambda all_ranks: all_ranks.amax(0)),
        (dist.ReduceOp.PRODUCT, lambda all_ranks: all_ranks.prod(0)),
    ],
)
def test_reductions(ranks: tuple[int, int], op: dist.ReduceOp, expected: Callable[[Tensor], Tensor]) -> None:
    rank, size = ranks
    all_ranks = torch.stack([mine(place) for place in range(size)])
    tensor = mine(rank)
    dist.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, expected(all_ranks))

    tensor = mine(rank)
    dist.reduce(tensor, size - 1, op)
    torch.testing.assert_close(tensor, expected(all_ranks) if rank == size - 1 else mine(rank))

    part = torch.empty(2, 3)
    dist.reduce_scatter(part, [mine(rank) + place for place in range(size)], op)
    torch.testing.assert_close(part, expected(all_ranks + rank))
    dist.reduce_scatter_tensor(part, torch.cat([mine(rank) + place for place in range(size)]), op)
    torch.testing.assert_close(part, expected(all_ranks + rank))


def test_every_rank_gets_what_one_has(ranks: tuple[int, int]) -> None:
    rank, size = ranks
    root = size - 1
    tensor = mine(rank).t()
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, mine(root).t())
    output = torch.empty(2, 3)
    dist.scatter(output, [mine(place) + 1 for place in range(size)] if rank == root else None, src=root)
    assert torch.equal(output, mine(rank) + 1)
    objects = [{"from": rank}, None if rank else "second"]
    dist.broadcast_object_list(objects, 0)
    assert objects == [{"from": 0}, "second"]
    part: list[object] = [None]
    dist.scatter_object_list(part, [f"for {place}" for place in range(size)] if rank == root else None, src=root)
    assert part == [f"for {rank}"]


def test_one_rank_or_all_get_what_every_rank_has(ranks: tuple[int, int]) -> None:
    rank, size = ranks
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, mine(rank))
    assert all(torch.equal(output, mine(place)) for place, output in enumerate(outputs))
    whole = torch.empty(2 * size, 3)
    dist.all_gather_into_tensor(whole, mine(rank))
    assert torch.equal(whole, torch.cat(outputs))
    gathered = [torch.empty(()) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor(float(rank)), gathered, dst=0)
    assert gathered is None or torch.stack(gathered).tolist() == list(range(size))
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, "x" * rank)
    assert objects == ["x" * place for place in range(size)]
    at_root = [None] * size if rank == 0 else None
    dist.gather_object({rank}, at_root, dst=0)
    assert at_root is None or at_root == [{place} for place in range(size)]


def test_all_send_to_all(ranks: tuple[int, int]) -> None:
    rank, size = ranks
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((place + 1,), float(rank)) for place in range(size)])
    assert all(torch.equal(output, torch.full((rank + 1,), float(place))) for place, output in enumerate(outputs))
    rows = torch.empty(size, 2)
    dist.all_to_all_single(rows, torch.full((size, 2), float(rank)))
    assert rows[:, 0].tolist() == list(range(size))
    uneven = torch.empty(size * (rank + 1), 2)
    sent = torch.full((sum(range(size + 1)), 2), float(rank))
    dist.all_to_all_single(uneven, sent, [rank + 1] * size, list(range(1, size + 1)))
    assert uneven[:, 1].tolist() == [float(place) for place in range(size) for _ in range(rank + 1)]


def test_asynchronous_calls_are_complete_once_they_were_waited_for(ranks: tuple[int, int]) -> None:
    rank, size = ranks
    tensor = torch.tensor([rank])
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert work.wait()
    assert tensor.item() == sum(range(size))
    dist.barrier()


def test_a_second_group_of_all_ranks_does_not_meet_the_first(ranks: tuple[int, int]) -> None:
    rank, size = ranks
    second = dist.new_group()
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=second)
    dist.all_reduce(tensor)
    assert tensor.item() == size * sum(range(size))


def test_torch_trains_over_it(ranks: tuple[int, int]) -> None:
    rank, size = ranks
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((1, 3), float(rank))).sum().backward()
    weights = [torch.empty(1, 3) for _ in range(size)]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), (size - 1) / 2))


def test_another_backend_is_not_replaced(hvd: ModuleType) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="'gloo'"):
            init_process_group()
    finally:
        dist.destroy_process_group()

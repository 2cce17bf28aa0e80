"""Functional collectives: values and gradients; within torch.compile they are in parallelism/test_compiled.py."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.torch_distributed.backend import World, mine, of_all
from torch import Tensor

Group = dist.ProcessGroup
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def in_rows(tensor: Tensor, size: int) -> Tensor:
    return torch.cat([tensor + place for place in range(size)])


FUNCTIONS: dict[str, Callable[[Tensor, Group, int], Tensor]] = {
    "all_reduce": lambda x, group, size: funcol.all_reduce(x, "sum", group),
    "all_reduce by max": lambda x, group, size: funcol.all_reduce(x, "max", group),
    "all_gather_tensor": lambda x, group, size: funcol.all_gather_tensor(x, 0, group),
    "all_gather_tensor of columns": lambda x, group, size: funcol.all_gather_tensor(x, 1, group),
    "reduce_scatter_tensor": lambda x, group, size: funcol.reduce_scatter_tensor(in_rows(x, size), "sum", 0, group),
    "reduce_scatter_tensor of columns": lambda x, group, size: funcol.reduce_scatter_tensor(
        in_rows(x, size).t(), "sum", 1, group
    ),
    "all_to_all_single": lambda x, group, size: funcol.all_to_all_single(in_rows(x, size), None, None, group),
    "broadcast": lambda x, group, size: funcol.broadcast(x, size - 1, group),
    "all_reduce_coalesced": lambda x, group, size: torch.cat(funcol.all_reduce_coalesced([x, x + 1], "sum", group)),
    "all_gather_into_tensor_coalesced": lambda x, group, size: torch.cat(
        funcol.all_gather_into_tensor_coalesced([x, x + 1], group)
    ),
    "reduce_scatter_tensor_coalesced": lambda x, group, size: torch.cat(
        funcol.reduce_scatter_tensor_coalesced([in_rows(x, size), in_rows(x + 1, size)], "sum", [0, 0], group)
    ),
}


def expected(name: str, rank: int, size: int) -> Tensor:
    tensors = of_all(size)
    total = sum(tensors)
    scattered = total + rank * size
    return {
        "all_reduce": lambda: total,
        "all_reduce by max": lambda: torch.stack(tensors).amax(0),
        "all_gather_tensor": lambda: torch.cat(tensors),
        "all_gather_tensor of columns": lambda: torch.cat(tensors, 1),
        "reduce_scatter_tensor": lambda: scattered,
        "reduce_scatter_tensor of columns": lambda: scattered.t(),
        "all_to_all_single": lambda: torch.cat(tensors) + rank,
        "broadcast": lambda: tensors[-1],
        "all_reduce_coalesced": lambda: torch.cat([total, total + size]),
        "all_gather_into_tensor_coalesced": lambda: torch.cat([*tensors, *(each + 1 for each in tensors)]),
        "reduce_scatter_tensor_coalesced": lambda: torch.cat([scattered, scattered + size]),
    }[name]()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_eager(world: World, name: str) -> None:
    x = mine(world.rank)
    result = FUNCTIONS[name](x, dist.group.WORLD, world.size)
    assert torch.equal(result + 0, expected(name, world.rank, world.size))
    assert torch.equal(x, mine(world.rank))


def test_the_result_is_waited_for_when_it_is_used(world: World) -> None:
    results = [funcol.all_reduce(mine(world.rank) + number, "sum", dist.group.WORLD) for number in range(20)]
    assert isinstance(results[0], funcol.AsyncCollectiveTensor)
    for number, result in enumerate(results):
        assert torch.equal(result * 1, sum(of_all(world.size)) + number * world.size)
    funcol.all_reduce(mine(world.rank), "sum", dist.group.WORLD)  # Dropped without a look at it.


def test_groups_may_be_said_by_ranks_and_meshes(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("dp", "tp"))
    for group in (list(range(world.size)), (mesh, 0), mesh["dp"], dist.group.WORLD.group_name):
        assert torch.equal(funcol.all_reduce(mine(world.rank), "sum", group) + 0, sum(of_all(world.size)))


def test_uneven_all_to_all_single(world: World) -> None:
    """Rank i sends j rows to rank j."""
    counts = list(range(world.size))
    x = torch.cat([torch.full((count, 2), 10.0 * world.rank + count) for count in counts])
    result = funcol.all_to_all_single(x, [world.rank] * world.size, counts, dist.group.WORLD)
    rows = [torch.full((world.rank, 2), 10.0 * place + world.rank) for place in range(world.size)]
    assert torch.equal(result + 0, torch.cat(rows))


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    result = function(x)
    (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()
    return x.grad


def test_gradients_of_functional_collectives(world: World) -> None:
    """The gradient of a gather is the scattered sum, and the other way round."""
    x, group = mine(world.rank), dist.group.WORLD
    own = torch.arange(1.0, 6 * world.size + 1).view(-1, 3)[2 * world.rank : 2 * world.rank + 2]
    got = gradient(lambda x: funcol.all_gather_tensor_autograd(x, 0, group), x)
    assert torch.equal(got, own * world.size)
    got = gradient(lambda x: funcol.reduce_scatter_tensor_autograd(torch.cat([x] * world.size), "sum", 0, group), x)
    assert torch.equal(got, torch.arange(1.0, 7).view(2, 3) * world.size)
    got = gradient(lambda x: funcol.all_to_all_single_autograd(torch.cat([x] * world.size), None, None, group), x)
    assert torch.equal(got, sum(torch.arange(1.0, 7).view(2, 3) + 6 * world.rank for _ in range(world.size)))

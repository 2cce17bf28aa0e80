"""DeviceMesh: a group for each slice of a mesh of two and three dimensions, and DTensors upon them."""

import math

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def shapes(size: int, dimensions: int) -> list[tuple[int, ...]]:
    """All ways to cut so many ranks."""
    if dimensions == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in shapes(size // first, dimensions - 1)
    ]


def total(group: dist.ProcessGroup, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@pytest.mark.parametrize("names", [("dp",), ("dp", "tp"), ("pp", "dp", "tp")])
def test_each_dimension_has_its_group(world: World, names: tuple[str, ...]) -> None:
    for shape in shapes(world.size, len(names)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        ranks = torch.arange(world.size).view(shape)
        place = mesh.get_coordinate()
        assert ranks[tuple(place)] == world.rank
        for dimension, name in enumerate(names):
            index = tuple(slice(None) if other == dimension else where for other, where in enumerate(place))
            row = ranks[index].tolist()
            group = mesh[name].get_group() if len(names) > 1 else mesh.get_group()
            assert dist.get_process_group_ranks(group) == row
            assert total(group, world.rank) == sum(row)
            assert mesh.get_local_rank(name) == place[dimension]
            assert mesh.size(dimension) == shape[dimension]


def test_submeshes(world: World) -> None:
    shape = (world.size, 1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    both = mesh["pp", "dp"]
    assert both.shape == shape[:2]
    flat = both._flatten("all")
    assert total(flat.get_group(), 1) == world.size
    assert total(mesh["tp"].get_group(), 7) == 7


def test_a_mesh_from_groups(world: World) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert mesh.size() == world.size
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mesh.get_group())
    assert tensor.tolist() == [world.size] * 3
    mesh = DeviceMesh("cpu", list(range(world.size)))
    assert mesh.get_local_rank() == world.rank


def test_dtensors_move_between_placements(world: World) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    full = torch.arange(30.0).view(5, 6)
    for one in (Shard(0), Shard(1), Replicate()):
        for other in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(full, mesh, [one]).redistribute(mesh, [other])
            assert torch.equal(tensor.full_tensor(), full)
    from torch.distributed.tensor import DTensor

    parts = DTensor.from_local(full, mesh, [Partial()])
    assert torch.equal(parts.full_tensor(), full * world.size)
    assert torch.equal(parts.redistribute(mesh, [Shard(0)]).full_tensor(), full * world.size)


def test_a_product_of_dtensors_on_two_dimensions(world: World) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    first = next(count for count in range(math.isqrt(world.size), 0, -1) if world.size % count == 0)
    mesh = init_device_mesh("cpu", (first, world.size // first), mesh_dim_names=("dp", "tp"))
    a, b = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.arange(18.0).view(6, 3)
    left = distribute_tensor(a, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
    torch.testing.assert_close((left @ right).full_tensor(), a @ b)

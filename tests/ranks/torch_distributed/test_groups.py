"""Groups of any ranks: made, nested, split, in meshes, used at the same time, destroyed; nothing of them stays."""

import gc
import itertools
import os
import resource
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo, mine, of_all, on_several_hosts, start
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def members(world: World) -> list[list[int]]:
    """Every set of ranks."""
    ranks = range(world.size)
    return [list(each) for count in ranks for each in itertools.combinations(ranks, count + 1)]


def total(group: dist.ProcessGroup | None, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_groups_of_every_set_of_ranks(world: World) -> None:
    """They overlap, and each reduces over its own members."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in members(world)]
    for ranks, group in groups:
        if world.rank in ranks:
            assert total(group, 2.0**world.rank) == sum(2.0**rank for rank in ranks)
            objects = [None] * len(ranks)
            dist.all_gather_object(objects, world.rank, group=group)
            assert objects == ranks
            tensor = torch.tensor([world.rank])
            dist.broadcast(tensor, src=ranks[-1], group=group)
            assert tensor.item() == ranks[-1]
            dist.barrier(group)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    for ranks, group in groups:
        if world.rank in ranks:
            dist.destroy_process_group(group)


def test_what_a_group_tells_of_itself(world: World) -> None:
    for ranks in members(world):
        group = dist.new_group(ranks, group_desc="of some ranks")
        assert dist.get_rank(group) == (ranks.index(world.rank) if world.rank in ranks else -1)
        assert dist.get_world_size(group) == (len(ranks) if world.rank in ranks else -1)
        if world.rank not in ranks:
            continue
        assert dist.get_process_group_ranks(group) == ranks
        assert (group.rank(), group.size()) == (ranks.index(world.rank), len(ranks))
        assert dist.get_group_rank(group, ranks[-1]) == len(ranks) - 1
        assert dist.get_global_rank(group, 0) == ranks[0]
        assert dist.get_backend(group) == BACKEND
        assert group.group_desc == "of some ranks"
        assert group.group_name != dist.group.WORLD.group_name
        assert group.name() == BACKEND
        if len(ranks) < world.size:
            outside = next(rank for rank in range(world.size) if rank not in ranks)
            with pytest.raises(ValueError, match="not part of group"):
                dist.get_group_rank(group, outside)
        dist.destroy_process_group(group)
    assert dist.get_process_group_ranks(None) == list(range(world.size))
    assert dist.group.WORLD.group_desc == "default_pg"


def test_members_alone_make_a_group(world: World) -> None:
    """use_local_synchronization: the other ranks do not call."""
    for ranks in ([0], [world.size - 1], list(range(1, world.size)) or [0]):
        if world.rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert total(group, 1.0) == len(ranks)
            dist.destroy_process_group(group)
    even = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    group = dist.new_group(even, use_local_synchronization=True)
    assert total(group, world.rank) == sum(even)


def test_the_order_of_ranks_is_sorted_unless_it_shall_stay(world: World) -> None:
    backwards = list(range(world.size))[::-1]
    group = dist.new_group(backwards)
    assert dist.get_rank(group) == world.rank
    group = dist.new_group(backwards, sort_ranks=False)
    assert dist.get_rank(group) == world.size - 1 - world.rank
    rows = [torch.zeros(1) for _ in backwards]
    dist.all_gather(rows, torch.tensor([float(world.rank)]), group=group)
    assert [row.item() for row in rows] == backwards
    tensor = torch.tensor([world.rank])
    dist.broadcast(tensor, src=world.size - 1, group=group)
    assert tensor.item() == world.size - 1
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.arange(float(world.size)), group=group)
    assert part.item() == dist.get_rank(group) * world.size


def test_calls_in_different_groups_may_cross(world: World) -> None:
    """Asynchronous calls of two groups, started in opposite orders on two ranks."""
    one, other = dist.new_group(), dist.new_group()
    order = [one, other] if world.rank % 2 else [other, one]
    tensors = {group: mine(world.rank, 1000) + (group is one) for group in order}
    works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    assert torch.equal(tensors[one], sum(each + 1 for each in of_all(world.size, 1000)))
    assert torch.equal(tensors[other], sum(of_all(world.size, 1000)))


def test_new_subgroups(world: World) -> None:
    for count in (count for count in range(1, world.size + 1) if world.size % count == 0):
        mine_of_them, groups = dist.new_subgroups(group_size=count)
        assert len(groups) == world.size // count
        first = world.rank // count * count
        assert total(mine_of_them, world.rank) == sum(range(first, first + count))
    everyone = [list(range(world.size))]
    group, _ = dist.new_subgroups_by_enumeration(everyone)
    assert total(group, 1) == world.size
    with pytest.raises(ValueError, match="must not exceed"):
        dist.new_subgroups(group_size=world.size + 1)


@beyond_gloo
def test_split_group(world: World) -> None:
    """Each part has its own group; ranks are places in the parent."""
    halves = [list(range((world.size + 1) // 2)), list(range((world.size + 1) // 2, world.size))]
    halves = [half for half in halves if half]
    group = dist.split_group(split_ranks=halves, timeout=timedelta(seconds=60), group_desc="half")
    own = next(half for half in halves if world.rank in half)
    assert dist.get_process_group_ranks(group) == own
    assert total(group, world.rank) == sum(own)
    parts = [[place] for place in range(len(own))]
    alone = dist.split_group(group, parts)
    assert dist.get_process_group_ranks(alone) == [world.rank]
    assert total(alone, 3) == 3

    some = dist.split_group(split_ranks=[[0]])
    assert (some is None or some is dist.GroupMember.NON_GROUP_MEMBER) == (world.rank > 0)
    with pytest.raises((ValueError, RuntimeError)):
        dist.split_group(split_ranks=[[0], [0]])
    dist.barrier()


def test_groups_of_gloo_beside_it(world: World) -> None:
    """The store of the default group serves other backends, too."""
    if on_several_hosts(world):
        pytest.skip("gloo would have to be told the networks of the hosts")
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == "gloo"
    assert total(group, 1) == total(None, 1) == world.size
    dist.destroy_process_group(group)


def test_a_group_that_this_rank_does_not_belong_to(world: World) -> None:
    """Collectives do nothing but warn."""
    group = dist.new_group([0])
    if world.rank > 0:
        tensor = torch.ones(1)
        with pytest.warns(UserWarning, match="does not belong to"):
            assert dist.all_reduce(tensor, group=group) is None
        assert tensor == 1


@pytest.mark.parametrize("turn", range(2))
def test_destroy_all_and_start_again(world: World, turn: int) -> None:
    """Groups of the first start are gone with it; the second has none of its calls."""
    group = dist.new_group()
    assert total(group, 1) == world.size
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(torch.ones(1))
    start()
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    assert total(None, world.rank) == sum(range(world.size))
    assert total(dist.new_group(), 1) == world.size


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


GROUPS = 300
# What a group may leave behind: the records that torch and MPI keep.
KIB_OF_A_GROUP = 20


def held() -> tuple[int, int, int]:
    """Open files, files in /dev/shm that are ours, and threads."""
    gc.collect()
    ours = sum(f"{os.getpid()}" in path.name for path in Path("/dev/shm").iterdir())
    return len(os.listdir("/proc/self/fd")), ours, threading.active_count()


def use(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == group.size()


def make(world: World, number: int) -> None:
    """Groups of all, of all but one, and of one rank."""
    outside = number % (world.size + 1)
    ranks = [rank for rank in range(world.size) if rank != outside] or [0]
    group = dist.new_group(ranks, use_local_synchronization=number % 2 == 0)
    if world.rank in ranks:
        use(group)
        dist.destroy_process_group(group)


@beyond_gloo
def test_groups_leave_nothing_behind(world: World) -> None:
    for number in range(20):
        make(world, number)
    before, memory = held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(GROUPS):
        make(world, number)
    dist.barrier()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert held() == before
    assert grown < KIB_OF_A_GROUP * GROUPS

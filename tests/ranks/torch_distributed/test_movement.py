"""broadcast, all_gather, gather, scatter and all_to_all: what each rank has goes where torch.distributed says."""

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo
from support.torch_distributed.values import COMPLEX, FLOATS, INTEGERS, UNKNOWN_TO_GLOO, mine, of_all

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
each_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype,
            id=str(dtype)[6:],
            marks=beyond_gloo if dtype in (*UNKNOWN_TO_GLOO, *NARROW) and dtype != torch.bool else (),
        )
        for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, *NARROW)
    ],
)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@each_dtype
def test_broadcast_brings_what_the_root_has(world: World, dtype: torch.dtype) -> None:
    for root in range(world.size):
        tensor = mine(world.rank, dtype=dtype)
        assert dist.broadcast(tensor, root) is None
        assert equal([tensor], [mine(root, dtype=dtype)])


@each_dtype
def test_all_gather_fills_a_list(world: World, dtype: torch.dtype) -> None:
    rows = [torch.zeros(2, 3, dtype=dtype) for _ in range(world.size)]
    dist.all_gather(rows, mine(world.rank, dtype=dtype))
    assert equal(rows, of_all(world.size, dtype=dtype))


@each_dtype
def test_all_gather_fills_one_tensor(world: World, dtype: torch.dtype) -> None:
    """Concatenated or stacked, as the shape of the output says."""
    joined = torch.zeros(2 * world.size, 3, dtype=dtype)
    dist.all_gather_into_tensor(joined, mine(world.rank, dtype=dtype))
    assert equal(list(joined.chunk(world.size)), of_all(world.size, dtype=dtype))
    if BACKEND == "gloo":
        return  # It refuses the stacked form.
    stacked = torch.zeros(world.size, 2, 3, dtype=dtype)
    dist.all_gather_into_tensor(stacked, mine(world.rank, dtype=dtype))
    assert equal(list(stacked.unbind()), of_all(world.size, dtype=dtype))


@each_dtype
def test_gather_fills_the_list_of_the_root(world: World, dtype: torch.dtype) -> None:
    if BACKEND == "gloo" and dtype.is_complex:
        pytest.skip("gloo's gather refuses complex tensors")
    for root in range(world.size):
        rows = [torch.zeros(2, 3, dtype=dtype) for _ in range(world.size)] if world.rank == root else None
        dist.gather(mine(world.rank, dtype=dtype), rows, dst=root)
        assert rows is None or equal(rows, of_all(world.size, dtype=dtype))


@each_dtype
def test_scatter_hands_out_the_list_of_the_root(world: World, dtype: torch.dtype) -> None:
    for root in range(world.size):
        output = torch.zeros(2, 3, dtype=dtype)
        dist.scatter(output, of_all(world.size, dtype=dtype) if world.rank == root else None, src=root)
        assert equal([output], [mine(world.rank, dtype=dtype)])


def parcel(sender: int, receiver: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return mine(7 * sender + receiver, *shape, dtype=dtype)


@each_dtype
def test_all_to_all_of_lists(world: World, dtype: torch.dtype) -> None:
    outputs = [torch.zeros(2, 3, dtype=dtype) for _ in range(world.size)]
    dist.all_to_all(outputs, [parcel(world.rank, place, dtype=dtype) for place in range(world.size)])
    assert equal(outputs, [parcel(place, world.rank, dtype=dtype) for place in range(world.size)])


@each_dtype
def test_all_to_all_single_with_equal_parts(world: World, dtype: torch.dtype) -> None:
    output = torch.zeros(2 * world.size, 3, dtype=dtype)
    dist.all_to_all_single(output, torch.cat([parcel(world.rank, place, dtype=dtype) for place in range(world.size)]))
    assert equal(
        list(output.chunk(world.size)), [parcel(place, world.rank, dtype=dtype) for place in range(world.size)]
    )


def test_all_to_all_single_with_splits(world: World) -> None:
    """Rank i sends i + j rows to rank j, which is none for the first two of them to each other."""
    splits = [world.rank + place for place in range(world.size)]
    output = torch.full((sum(splits), 2), -1.0)
    rows = torch.cat([parcel(world.rank, place, count, 2) for place, count in enumerate(splits)])
    work = dist.all_to_all_single(output, rows, splits, splits, async_op=True)
    work.wait()
    expected = torch.cat([parcel(place, world.rank, count, 2) for place, count in enumerate(splits)])
    assert torch.equal(output, expected)


def test_all_to_all_single_where_some_send_nothing(world: World) -> None:
    """All goes to the last rank."""
    last = world.size - 1
    sent = [0] * last + [3]
    came = [3] * world.size if world.rank == last else [0] * world.size
    output = torch.zeros(sum(came))
    dist.all_to_all_single(output, mine(world.rank, 3), came, sent)
    if world.rank == last:
        assert torch.equal(output, torch.cat(of_all(world.size, 3)))


@beyond_gloo
def test_all_to_all_of_different_shapes(world: World) -> None:
    """What rank i sends to rank j is of i + 1 rows and j columns."""
    outputs = [torch.zeros(place + 1, world.rank) for place in range(world.size)]
    dist.all_to_all(outputs, [parcel(world.rank, place, world.rank + 1, place) for place in range(world.size)])
    assert equal(outputs, [parcel(place, world.rank, place + 1, world.rank) for place in range(world.size)])


def test_all_gather_of_uneven_tensors(world: World) -> None:
    """Each entry of the list has the shape of what its rank has."""
    if BACKEND == "gloo":
        pytest.skip("gloo wants equal shapes")
    rows = [torch.zeros(rank + 1, 2) for rank in range(world.size)]
    dist.all_gather(rows, mine(world.rank, world.rank + 1, 2))
    assert equal(rows, [mine(rank, rank + 1, 2) for rank in range(world.size)])

    rows = [torch.zeros(rank) for rank in range(world.size)]
    dist.all_gather(rows, mine(world.rank, world.rank) if world.rank else torch.zeros(0))
    assert equal(rows[1:], [mine(rank, rank) for rank in range(1, world.size)])


@beyond_gloo
def test_reduce_scatter_of_uneven_tensors(world: World) -> None:
    """Rank i gets i + 1 rows."""
    output = torch.zeros(world.rank + 1, 2)
    dist.reduce_scatter(output, [mine(world.rank, place + 1, 2) for place in range(world.size)])
    assert torch.equal(output, sum(mine(place, world.rank + 1, 2) for place in range(world.size)))


def test_coalesced_all_gathers(world: World) -> None:
    shapes = ((3,), (2, 2))
    join = torch.cat if BACKEND == "gloo" else torch.stack
    for asynchronous in (False, True):
        expected = [join(of_all(world.size, *shape)) for shape in shapes]
        outputs = [torch.zeros_like(each) for each in expected]
        with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
            for output, shape in zip(outputs, shapes, strict=True):
                dist.all_gather_into_tensor(output, mine(world.rank, *shape))
        if asynchronous:
            manager.wait()
        assert equal(outputs, expected)

        rows = [[torch.zeros(shape) for shape in shapes] for _ in range(world.size)]
        future = dist.all_gather_coalesced(rows, [mine(world.rank, *shape) for shape in shapes], async_op=asynchronous)
        if asynchronous:
            future.wait()
        for rank, row in enumerate(rows):
            assert equal(row, [mine(rank, *shape) for shape in shapes])


def test_the_root_may_be_said_by_its_place_in_the_group(world: World) -> None:
    """group_src and group_dst, in a group whose first member is not rank 0."""
    members = list(range(1, world.size)) or [0]
    group = dist.new_group(members)
    if world.rank not in members:
        return
    place, last = dist.get_rank(group), len(members) - 1
    tensor = mine(place)
    dist.broadcast(tensor, group=group, group_src=last)
    assert torch.equal(tensor, mine(last))
    tensor = mine(place)
    dist.reduce(tensor, group=group, group_dst=last)
    assert place != last or torch.equal(tensor, sum(of_all(len(members))))
    rows = [torch.zeros(2, 3) for _ in members] if place == last else None
    dist.gather(mine(place), rows, group=group, group_dst=last)
    assert rows is None or equal(rows, of_all(len(members)))
    output = torch.zeros(2, 3)
    dist.scatter(output, of_all(len(members)) if place == last else None, group=group, group_src=last)
    assert torch.equal(output, mine(place))
    objects = [place]
    dist.broadcast_object_list(objects, group=group, group_src=last)
    assert objects == [last]
    gathered = [None] * len(members) if place == last else None
    dist.gather_object(place, gathered, group=group, group_dst=last)
    assert gathered is None or gathered == list(range(len(members)))
    part = [None]
    dist.scatter_object_list(part, list(range(len(members))) if place == last else None, group=group, group_src=last)
    assert part == [place]
    dist.destroy_process_group(group)

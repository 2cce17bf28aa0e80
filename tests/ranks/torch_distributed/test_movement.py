"""Movement beside the model: tensors of other shapes for each pair of ranks, roots said by their places."""

import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, beyond_gloo
from support.torch_distributed.values import mine, of_all


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def parcel(sender: int, receiver: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return mine(7 * sender + receiver, *shape, dtype=dtype)


@beyond_gloo
def test_all_to_all_of_different_shapes(world: World) -> None:
    """What rank i sends to rank j is of i + 1 rows and j columns."""
    outputs = [torch.zeros(place + 1, world.rank) for place in range(world.size)]
    dist.all_to_all(outputs, [parcel(world.rank, place, world.rank + 1, place) for place in range(world.size)])
    assert equal(outputs, [parcel(place, world.rank, place + 1, world.rank) for place in range(world.size)])


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

"""torch.distributed's own functions for point to point, over hvlike: what gloo does, and pipelines."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import World

from hvlike.errors import StalledError

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("elements", [0, 5, 300_000])
def test_send_and_recv(world: World, elements: int) -> None:
    rank, size, _ = world
    tensor = torch.zeros(elements)
    if rank == 0:
        dist.send(torch.full((elements,), 3.0), 1, tag=4)
        assert dist.recv(tensor, size - 1, tag=5) == size - 1
    elif rank == 1:
        assert dist.recv(tensor, 0, tag=4) == 0
        assert (tensor == 3).all()
    if rank == size - 1:
        dist.send(torch.full((elements,), 4.0), 0, tag=5)
    if rank == 0:
        assert (tensor == 4).all()


def test_works_end_after_the_call(world: World) -> None:
    rank, size, _ = world
    tensor = torch.zeros(4)
    work = dist.irecv(tensor, (rank - 1) % size)
    assert not work.is_completed()
    future = work.get_future()
    dist.barrier()
    dist.isend(torch.full((4,), float(rank)), (rank + 1) % size).wait()
    assert torch.equal(future.wait()[0], torch.full((4,), float((rank - 1) % size)))
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.source_rank() == (rank - 1) % size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
def test_batches_of_both_directions(world: World, dtype: torch.dtype) -> None:
    rank, size, _ = world
    sent = [torch.full((7, number), rank + number).to(dtype) for number in (1, 50_000)]
    received = [torch.zeros_like(each) for each in sent]
    operations = []
    for outgoing, incoming in zip(sent, received, strict=True):
        operations.append(dist.P2POp(dist.irecv, incoming, (rank - 1) % size))
        operations.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % size))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for number, each in zip((1, 50_000), received, strict=True):
        assert torch.equal(each, torch.full((7, number), (rank - 1) % size + number).to(dtype))


def test_objects(world: World) -> None:
    rank = world.rank
    objects: list[Any] = [{"a": torch.arange(3)}, "text" * 10_000, None]
    if rank == 0:
        dist.send_object_list(objects, 1)
    elif rank == 1:
        found: list[Any] = [None] * 3
        assert dist.recv_object_list(found, 0) == 0
        assert torch.equal(found[0]["a"], torch.arange(3))
        assert found[1:] == objects[1:]


def test_groups_do_not_mix(world: World) -> None:
    """The same ranks and the same tag, in two groups; ranks of a group count in its order."""
    rank, size, _ = world
    groups = [dist.new_group([size - 1, 0]), dist.new_group(list(range(size)))]
    if rank == 0:
        for value, group in enumerate(groups):
            dist.send(torch.full((2,), float(value)), size - 1, group=group)
    if rank == size - 1:
        tensor = torch.zeros(2)
        for value in (1, 0):
            group = groups[value]
            assert dist.recv(tensor, group=group) == 0
            assert (tensor == value).all()
        dist.send(torch.ones(2), group=groups[0], group_dst=dist.get_group_rank(groups[0], 0))
    if rank == 0:
        tensor = torch.zeros(2)
        dist.recv(tensor, group=groups[0], group_src=dist.get_group_rank(groups[0], size - 1))
        assert (tensor == 1).all()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_timeout_names_the_other_rank_and_leaves_the_group_alone(world: World) -> None:
    rank = world.rank
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier()
    tensor = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(tensor, 1, tag=7, group=group)
        with pytest.raises(StalledError, match=r"rank 0: recv from rank 1, tag 7, .* has taken"):
            work.wait(timedelta(seconds=0.2))
        assert not work.is_completed()
        with pytest.raises(
            StalledError, match=r"rank 0: recv from rank 1, tag 7, .* timed out after .* timeout of 1 s"
        ):
            work.wait()
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(3), 0, tag=7, group=group)
    if rank == 0:
        assert not tensor.any()
        dist.recv(tensor, 1, tag=7, group=group)
        assert tensor.all()
    dist.destroy_process_group(group)


def test_self_is_refused(world: World) -> None:
    rank = world.rank
    with pytest.raises(ValueError, match="rank"):
        dist.send(torch.zeros(1), rank)
    with pytest.raises(ValueError, match="named itself"):
        dist.recv(torch.zeros(1), rank)

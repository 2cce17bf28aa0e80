"""A ProcessGroup's own methods, which libraries call directly: with options, and in the short forms of the bindings."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, mine, of_all

MINUTE = timedelta(seconds=60)


@pytest.fixture
def group(world: World) -> dist.ProcessGroup:
    return dist.group.WORLD


def rows(world: World) -> list[torch.Tensor]:
    return [torch.zeros(2, 3) for _ in range(world.size)]


def test_reductions(world: World, group: dist.ProcessGroup) -> None:
    total, largest = sum(of_all(world.size)), torch.stack(of_all(world.size)).amax(0)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    options.timeout = MINUTE
    for expected, arguments, more in (
        (total, (), {}),
        (largest, (dist.ReduceOp.MAX,), {}),
        (largest, (), {"op": dist.ReduceOp.MAX, "timeout": MINUTE}),
        (largest, (options,), {}),
        (largest, (), {"opts": options}),
    ):
        tensor = mine(world.rank)
        group.allreduce([tensor], *arguments, **more).wait()
        assert torch.equal(tensor, expected)
        if options not in (*arguments, *more.values()):
            tensor = mine(world.rank)
            group.allreduce(tensor, *arguments, **more).wait()
            assert torch.equal(tensor, expected)
    tensor = mine(world.rank)
    group.reduce(tensor, root=0).wait()
    assert world.rank > 0 or torch.equal(tensor, total)
    tensor = mine(world.rank)
    group.reduce(tensor, 0, dist.ReduceOp.MAX).wait()
    assert world.rank > 0 or torch.equal(tensor, largest)
    output = torch.zeros(2, 3)
    group.reduce_scatter(output, [mine(world.rank)] * world.size, dist.ReduceOp.SUM).wait()
    assert torch.equal(output, total)
    group.reduce_scatter([output.zero_()], [[mine(world.rank)] * world.size]).wait()
    assert torch.equal(output, total)
    group._reduce_scatter_base(output.zero_(), torch.cat([mine(world.rank)] * world.size)).wait()
    assert torch.equal(output, total)
    group.reduce_scatter_single(output.zero_(), torch.cat([mine(world.rank)] * world.size)).wait()
    assert torch.equal(output, total)
    tensors = [mine(world.rank), mine(world.rank, 4)]
    group.allreduce_coalesced(tensors).wait()
    assert torch.equal(tensors[0], total)


def test_movement(world: World, group: dist.ProcessGroup) -> None:
    everything = of_all(world.size)
    for arguments in ((world.size - 1,), (world.size - 1, MINUTE)):
        tensor = mine(world.rank)
        group.broadcast(tensor, *arguments).wait()
        assert torch.equal(tensor, everything[-1])
    options = dist.BroadcastOptions()
    options.rootRank = world.size - 1
    tensor = mine(world.rank)
    group.broadcast([tensor], options).wait()
    assert torch.equal(tensor, everything[-1])

    outputs = rows(world)
    group.allgather(outputs, mine(world.rank)).wait()
    assert torch.equal(torch.stack(outputs), torch.stack(everything))
    outputs = rows(world)
    group.allgather([outputs], [mine(world.rank)]).wait()
    assert torch.equal(torch.stack(outputs), torch.stack(everything))
    for method in (group._allgather_base, group.all_gather_single):
        joined = torch.zeros(2 * world.size, 3)
        method(joined, mine(world.rank)).wait()
        assert torch.equal(joined, torch.cat(everything))

    outputs = rows(world) if world.rank == 0 else []
    group.gather(outputs, mine(world.rank), root=0).wait() if world.rank == 0 else group.gather(
        [], [mine(world.rank)], dist.GatherOptions()
    ).wait()
    assert world.rank > 0 or torch.equal(torch.stack(outputs), torch.stack(everything))
    output = torch.zeros(2, 3)
    if world.rank == 0:
        group.scatter(output, everything, root=0).wait()
    else:
        group.scatter([output], []).wait()
    assert torch.equal(output, mine(world.rank))


def test_exchanges_and_barriers(world: World, group: dist.ProcessGroup) -> None:
    sent = torch.cat([mine(world.rank + place) for place in range(world.size)])
    for method in (group.alltoall_base, group.all_to_all_single):
        for more in ([], [MINUTE], [dist.AllToAllOptions()]):
            output = torch.zeros(2 * world.size, 3)
            method(output, sent, [], [], *more).wait()
            assert torch.equal(output, sent)
    if BACKEND != "gloo":
        outputs = rows(world)
        group.alltoall(outputs, list(sent.chunk(world.size))).wait()
        assert torch.equal(torch.cat(outputs), sent)
    group.barrier().wait()
    group.barrier(dist.BarrierOptions()).wait()
    group.barrier(timeout=MINUTE).wait()


def test_what_it_tells(world: World, group: dist.ProcessGroup) -> None:
    assert (group.rank(), group.size(), group.name()) == (world.rank, world.size, BACKEND)
    backend = group._get_backend(torch.device("cpu"))
    assert (backend.rank(), backend.size(), backend.name()) == (world.rank, world.size, BACKEND)
    assert torch.device("cpu") in group._device_types
    assert group.get_group_store() is not None
    assert dist.get_backend_config(group).startswith("cpu:") or BACKEND in dist.get_backend_config(group)
    group.set_timeout(timedelta(minutes=30))
    before = group._get_sequence_number_for_group()
    group.allreduce(torch.ones(1)).wait()
    assert group._get_sequence_number_for_group() == before + 1


def test_the_timeout_may_be_changed(world: World) -> None:
    """Of a group, and of the default group where none is said."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    set_timeout = dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=0.5), group)
    if world.size > 1 and world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.recv(torch.ones(1), 1, group=group)
    set_timeout(timedelta(minutes=30))
    dist.barrier()

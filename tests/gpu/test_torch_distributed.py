"""torch.distributed over hvlike with tensors on a GPU: every collective, works that are not waited for at once, DDP."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def group(hvd: ModuleType, device: torch.device) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
    yield dist.group.WORLD
    dist.destroy_process_group()


def rows(device: torch.device, size: int) -> torch.Tensor:
    """Row r is what the collectives below leave where rank r's data go: its rank and one."""
    return torch.arange(1.0, size + 1, device=device)[:, None].expand(size, 3).contiguous()


def all_reduce(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dist.all_reduce(own)
    return own, everybody.sum(0)


def asynchronously(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    works = [dist.all_reduce(each, async_op=True) for each in (own, own.clone())]
    for work in works:
        work.wait()
    return own + 0, everybody.sum(0)


def all_gather(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(everybody)
    dist.all_gather(list(output.unbind()), own)
    return output, everybody


def reduce_scatter(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(own)
    dist.reduce_scatter(output, list(everybody.clone().unbind()), op=dist.ReduceOp.AVG)
    return output, everybody[rank]


def all_to_all(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(everybody)
    dist.all_to_all(list(output.unbind()), [own] * len(everybody))
    return output, everybody


def broadcast(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dist.broadcast(own, len(everybody) - 1)
    return own, everybody[-1]


def scatter(own: torch.Tensor, everybody: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(own)
    dist.scatter(output, list(everybody.unbind()) if rank == 0 else None, 0)
    return output, own


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call", [all_reduce, asynchronously, all_gather, reduce_scatter, all_to_all, broadcast, scatter]
)
def test_a_collective_of_tensors_on_a_gpu(
    group: dist.ProcessGroup,
    device: torch.device,
    call: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = rows(device, size)
    got, expected = call(everybody[rank].clone(), everybody, rank)
    assert got.device.type == "cuda"
    torch.testing.assert_close(got, expected)


@pytest.mark.gpu
def test_objects_and_tensors_of_the_host_go_beside_those_of_the_gpu(
    group: dist.ProcessGroup, device: torch.device
) -> None:
    size = dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == list(range(size))
    here, there = torch.ones(3), torch.ones(3, device=device)
    dist.all_reduce(here)
    dist.all_reduce(there)
    assert here.tolist() == there.tolist() == [size] * 3


@pytest.mark.gpu
def test_torchs_ddp_averages_the_gradients(group: dist.ProcessGroup, device: torch.device) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        pytest.skip("torch's DDP takes tensors on a GPU only in a torch that was built for one")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, bias=False).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        model.weight.grad = None
        parallel(torch.full((1, 4), float(rank), device=device)).sum().backward()
        mean = sum(range(size)) / size
        torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, mean))

"""torch.compile of models that are data parallel or sharded, and of functions with collectives in them."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.torch_distributed.problem import adam, assert_equal, batch_of, model_of, train, trained_alone
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.differs_by_ranks(2)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


@pytest.mark.parametrize("wrapped", [data_parallel, sharded])
def test_models_as_one_process(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    model = wrapped(model_of())
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, adam(model.parameters()))
    assert_equal(model, trained_alone(optimizer=adam))


def test_functions_with_collectives() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()

    def collectives(value: Tensor) -> tuple[Tensor, ...]:
        total = functional.all_reduce(value, "sum", group)
        rows = functional.all_gather_single(value, 0, group)
        part = functional.reduce_scatter_single(rows, "sum", 0, group)
        turned = functional.all_to_all_single(rows, None, None, group)
        root = functional.broadcast(value + 1, 0, group)
        return total * 2, rows, part, turned, root

    value = torch.arange(4.0) + dist.get_rank()
    compiled = torch.compile(collectives, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(value), collectives(value), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))
    assert torch.equal(compiled(value)[0], 2 * (size * torch.arange(4.0) + size * (size - 1) / 2))


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch called it otherwise before 2.10")
def test_the_collectives_of_torch_distributed_in_a_compiled_function() -> None:
    """In place, as programs write them."""
    size = dist.get_world_size()

    def step(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = value * 2
        dist.all_reduce(total)
        rows = torch.empty(size * len(value))
        dist.all_gather_single(rows, value)
        part = torch.empty_like(value)
        dist.reduce_scatter_single(part, rows)
        return total + 1, rows * 1, part * 1

    value = torch.full((3,), dist.get_rank() + 1.0)
    total, rows, part = torch.compile(step, backend="aot_eager")(value)
    assert torch.equal(total, torch.full((3,), size * (size + 1.0) + 1))
    assert torch.equal(rows, torch.arange(1.0, size + 1).repeat_interleave(3))
    assert torch.equal(part, value * size)


def test_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = batch_of(0)[0]

    def product(value: Tensor) -> Tensor:
        tensor = DTensor.from_local(value, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        return (tensor @ tensor.t()).to_local()

    mine = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(mine), inputs @ inputs.t())

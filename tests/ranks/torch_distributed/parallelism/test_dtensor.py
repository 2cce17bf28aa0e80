"""DTensor: tensors in shards, copies and partial sums, and what is computed with them."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn import functional


@pytest.fixture
def mesh() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))


@pytest.fixture
def plane() -> DeviceMesh:
    """The ranks in two dimensions."""
    size = dist.get_world_size()
    columns = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("rows", "columns"))


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator, dtype=torch.double)


PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate()]


@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (1, 3)], ids=["even", "uneven", "empty shards"])
@pytest.mark.parametrize("before", PLACEMENTS, ids=str)
@pytest.mark.parametrize("after", PLACEMENTS, ids=str)
def test_any_placement_becomes_any_other(
    mesh: DeviceMesh, shape: Sequence[int], before: Placement, after: Placement
) -> None:
    value = numbers(*shape)
    tensor = distribute_tensor(value, mesh, [before]).redistribute(placements=[after])
    assert tensor.placements == (after,)
    expected = value
    if isinstance(after, Shard):
        parts = value.chunk(dist.get_world_size(), after.dim)
        mine = dist.get_rank()
        expected = parts[mine] if mine < len(parts) else value.narrow(after.dim, 0, 0)
    assert torch.equal(tensor.to_local(), expected)
    assert torch.equal(tensor.full_tensor(), value)


@pytest.mark.parametrize("after", PLACEMENTS, ids=str)
def test_partial_sums_are_added_up(mesh: DeviceMesh, after: Placement) -> None:
    value = numbers(8, 12)
    tensor = DTensor.from_local(value * (dist.get_rank() + 1), mesh, [Partial()]).redistribute(placements=[after])
    size = dist.get_world_size()
    torch.testing.assert_close(tensor.full_tensor(), value * (size * (size + 1) // 2))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_results_of_other_operations(mesh: DeviceMesh, op: str) -> None:
    value = torch.full((4,), float(dist.get_rank()))
    tensor = DTensor.from_local(value, mesh, [Partial(op)]).full_tensor()
    size = dist.get_world_size()
    expected = {"sum": size * (size - 1) / 2, "avg": (size - 1) / 2, "max": size - 1.0, "min": 0.0}[op]
    assert torch.equal(tensor, torch.full((4,), expected))


@pytest.mark.parametrize("left", PLACEMENTS, ids=str)
@pytest.mark.parametrize("right", PLACEMENTS, ids=str)
def test_products_and_their_gradients(mesh: DeviceMesh, left: Placement, right: Placement) -> None:
    size = dist.get_world_size()
    values = [numbers(2 * size, 4 * size), numbers(4 * size, 3 * size)]
    factors = [
        distribute_tensor(value, mesh, [place]).requires_grad_()
        for value, place in zip(values, (left, right), strict=True)
    ]
    product = factors[0] @ factors[1]
    product.square().sum().backward()
    alone = [value.clone().requires_grad_() for value in values]
    (alone[0] @ alone[1]).square().sum().backward()
    torch.testing.assert_close(product.full_tensor(), values[0] @ values[1])
    for factor, other in zip(factors, alone, strict=True):
        torch.testing.assert_close(factor.grad.full_tensor(), other.grad)


def test_in_two_dimensions(plane: DeviceMesh) -> None:
    value = numbers(8, 12)
    for before, after in [
        ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(0)], [Shard(1), Replicate()]),
        ([Replicate(), Shard(1)], [Shard(1), Shard(0)]),
    ]:
        tensor = distribute_tensor(value, plane, before).redistribute(placements=after)
        assert torch.equal(tensor.full_tensor(), value)
    rows = plane["rows"]
    assert torch.equal(distribute_tensor(value, rows, [Shard(0)]).full_tensor(), value)


def test_reductions_softmax_and_loss(mesh: DeviceMesh) -> None:
    value = numbers(8, 12)
    for place in (Shard(0), Shard(1)):
        tensor = distribute_tensor(value, mesh, [place])
        for compute in (torch.sum, torch.mean, torch.max, lambda each: each.softmax(1), lambda each: each.norm()):
            torch.testing.assert_close(compute(tensor).full_tensor(), compute(value))


def test_a_module_and_its_optimizer(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    alone = nn.Linear(6, 4 * dist.get_world_size()).double()
    inputs, size = numbers(5, 6), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Linear(6, 4 * size).double()

    def shard(_: str, layer: nn.Module, over: DeviceMesh) -> None:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), over, [Shard(0)])))

    module = distribute_module(module, mesh, shard)
    for each, fed in ((alone, inputs), (module, distribute_tensor(inputs, mesh, [Replicate()]))):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            each(fed).tanh().square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(module.weight.full_tensor(), alone.weight.detach())


def test_embeddings_with_shares_of_the_table(mesh: DeviceMesh) -> None:
    table, rows = numbers(10, 6), torch.tensor([[0, 9, 3], [4, 4, 7]])
    for place in (Shard(0), Shard(1)):
        shards = distribute_tensor(table, mesh, [place]).requires_grad_()
        found = functional.embedding(distribute_tensor(rows, mesh, [Replicate()]), shards)
        torch.testing.assert_close(found.full_tensor(), functional.embedding(rows, table))

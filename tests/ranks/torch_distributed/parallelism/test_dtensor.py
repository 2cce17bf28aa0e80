"""DTensor: tensors in shards, copies and partial sums; and parallelize_module, layers in columns and rows."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import adam, assert_equal, model_of, train, trained_alone
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

pytestmark = pytest.mark.differs_by_ranks(2)


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
def test_any_placement_becomes_any_other(mesh: DeviceMesh, shape: Sequence[int]) -> None:
    value = numbers(*shape)
    for before, after in itertools.product(PLACEMENTS, repeat=2):
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


@pytest.mark.parametrize(("left", "right"), [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1))])
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


class Network(nn.Module):
    """Layers as in a block of a transformer, with widths that any of 1 to 4 ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 24)
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(48, 24)
        self.head = nn.Linear(24, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(self.up(self.norm(hidden)).relu())
        return self.head(hidden)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 12, (3, 24), generator=torch.Generator().manual_seed(step))


def plain() -> dict[str, ParallelStyle]:
    """Activations are whole on all ranks between the layers."""
    return {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}


def sequence() -> dict[str, ParallelStyle]:
    """Between the layers each rank has its part of the sequence."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def training(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy) -> list[float]:
    """The losses of three steps."""
    optimizer = adam(model.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        tokens = tokens_of(step)
        result = loss(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        result.backward()
        optimizer.step()
        losses.append(float(result.detach()))
    return losses


@pytest.mark.parametrize("plan", [plain, sequence])
def test_as_one_process(plan: Callable[[], dict[str, ParallelStyle]]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone = Network().double()
    model = parallelize_module(Network().double(), mesh, plan())
    assert training(model) == pytest.approx(training(alone), abs=1e-10)
    assert_equal(model, alone)


def test_the_loss_of_logits_in_shards() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone = Network().double()
    plan = {**plain(), "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    model = parallelize_module(Network().double(), mesh, plan)
    with loss_parallel():
        losses = training(model)
    assert losses == pytest.approx(training(alone), abs=1e-10)


def grid() -> DeviceMesh:
    size = dist.get_world_size()
    parts = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (size // parts, parts), mesh_dim_names=("data", "tensor"))


def test_inside_of_fully_shard() -> None:
    """Two dimensions: each layer in columns or rows over one, and in shards over the other."""
    mesh = grid()
    model = parallelize_module(model_of(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    train(model, adam(model.parameters()), mesh["data"].get_group())
    assert_equal(model, trained_alone(optimizer=adam))

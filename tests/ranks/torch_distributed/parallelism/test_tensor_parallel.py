"""parallelize_module: the layers of a model in columns and rows, with the sequence in shards or not."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import adam, assert_equal, batch_of, model_of, train, trained_alone
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional


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


def with_embedding() -> dict[str, ParallelStyle]:
    """The table too is shared out."""
    return {**plain(), "embedding": RowwiseParallel(input_layouts=Replicate())}


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


@pytest.mark.parametrize("plan", [plain, with_embedding, sequence])
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


def test_inputs_of_a_module_are_laid_out() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = batch_of(0)[0][:12]
    alone = model_of()
    model = model_of()
    layout = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    model = parallelize_module(model, mesh, layout)
    mine = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    torch.testing.assert_close(model(mine), alone(inputs))


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

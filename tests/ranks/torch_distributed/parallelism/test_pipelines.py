"""torch.distributed.pipelining: the stages of a model on different ranks, under each of its schedules.

It is imported in the tests: that takes a second, which every job would pay that collects this file.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.problem import assert_equal, batch_of, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.differs_by_ranks(2)

CHUNKS = 12  # Micro-batches, a multiple of 1 to 4 ranks
SCHEDULES = {  # And how many stages each rank has
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}


def layers_of(count: int) -> list[nn.Module]:
    """A model in as many parts."""
    torch.manual_seed(0)
    widths = [6, *[8 + place for place in range(count - 1)], 3]
    return [nn.Sequential(nn.Linear(before, after), nn.Tanh()).double() for before, after in itertools.pairwise(widths)]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def trained_alone(count: int) -> tuple[nn.Module, list[float]]:
    """The same model in one process, and its losses."""
    model = nn.Sequential(*layers_of(count))
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(3):
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def places_of(name: str, rank: int, size: int) -> list[int]:
    """The numbers of a rank's stages; those of ZBV go there and back."""
    if name == "ScheduleZBVZeroBubble":
        return [rank, 2 * size - 1 - rank]
    return list(range(rank, size * SCHEDULES[name], size))


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_one_process(name: str) -> None:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * SCHEDULES[name]
    places = places_of(name, rank, size)
    layers = layers_of(count)
    stages = [PipelineStage(layers[place], place, count, torch.device("cpu")) for place in places]
    made = getattr(schedules, name)
    schedule = made(stages[0] if SCHEDULES[name] == 1 else stages, CHUNKS, loss_fn=loss_of)
    optimizer = sgd([each for place in places for each in layers[place].parameters()])
    found: list[float] = []
    for step in range(3):
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        arguments = [inputs] if 0 in places else []
        is_last = count - 1 in places
        schedule.step(*arguments, target=targets if is_last else None, losses=losses if is_last else None)
        optimizer.step()
        if is_last:
            found.append(float(torch.stack(losses).mean().detach()))
    model, expected = trained_alone(count)
    for place in places:
        assert_equal(layers[place], model[place])
    assert found == (pytest.approx(expected, abs=1e-10) if is_last else [])


def test_copies_of_a_pipeline() -> None:
    """Two dimensions: two stages, and each stage is in shards over its copies."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    size = dist.get_world_size()
    parts = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // parts, parts), mesh_dim_names=("copies", "stages"))
    place, copy = mesh["stages"].get_local_rank(), mesh["copies"].get_local_rank()
    layers = layers_of(parts)
    stage = fully_shard(layers[place], mesh=mesh["copies"])
    pipeline = PipelineStage(stage, place, parts, torch.device("cpu"), group=mesh["stages"].get_group())
    schedule = Schedule1F1B(pipeline, 2, loss_fn=loss_of)
    optimizer = sgd(stage.parameters())
    for step in range(3):
        inputs, targets = (each[copy :: size // parts] for each in batch_of(step))
        optimizer.zero_grad()
        arguments = [inputs] if place == 0 else []
        schedule.step(*arguments, target=targets if place == parts - 1 else None)
        optimizer.step()
    assert_equal(layers[place], trained_alone(parts)[0][place])

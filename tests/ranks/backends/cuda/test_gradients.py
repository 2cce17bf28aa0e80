"""Planned reductions on a device: buckets are begun in the hooks, in the order of the plan, and nobody waits there."""

from pathlib import Path

import pytest
import torch
from ranks.backends.cuda.conftest import Late
from torch import Tensor

from hvlike import Average, Sum
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.plan import Entry
from hvlike.training.gradients.planned_reducer import PlannedReducer

SHAPES = [(300, 7), (5,), (2000,), (40, 50), (1,)]


def entries(dtype: torch.dtype = torch.float32) -> list[Entry]:
    return [Entry(f"p{index}", shape, dtype, torch.device("cpu")) for index, shape in enumerate(SHAPES)]


def values(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full(shape, (step + 1) * (rank + 1) + index, dtype=dtype) for index, shape in enumerate(SHAPES)]


def total(step: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    each = [values(step, rank) for rank in range(size)]
    return [torch.stack(list(same)).sum(0).to(dtype) for same in zip(*each, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_other_streams_are_waited_for(late: Late, dtype: torch.dtype) -> None:
    device, rank, size = late.device, late.hvd.rank(), late.hvd.size()
    reducer = PlannedReducer(entries(dtype), ReductionSettings(Sum, size), name=f"streams {dtype}")
    gradients = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    for step in range(4):
        producers = [device.new_stream(device.home()) for _ in range(2)]
        user = device.new_stream(device.home())
        for index in reversed(range(len(SHAPES))):
            with device.use(producers[index % 2]):
                gradients[index].copy_(values(step, rank, dtype)[index])
                reducer.mark_ready(index, gradients[index])
        with device.use(user):
            # What autograd does at the end of a backward pass, before anybody may ask for the gradients.
            for producer in producers:
                device.wait(user, device.record(producer))
            reducer.finish(gradients)
            seen = [each.clone() for each in gradients]
        device.drain(user)
        for found, expected in zip(seen, total(step, size, dtype), strict=True):
            assert torch.equal(found, expected)
    reducer.drop()


def test_a_hook_begins_its_bucket_and_does_not_wait(late: Late) -> None:
    device, rank, size = late.device, late.hvd.rank(), late.hvd.size()
    reducer = PlannedReducer(entries(), ReductionSettings(Average, size), name="hooks", groups=[[0, 1], [2], [3, 4]])
    reducer.resize(type(reducer.proposal.sizes)(1, 1))
    gradients = [torch.zeros(shape) for shape in SHAPES]
    reducer.finish(gradients)
    producer = device.new_stream(device.home())
    waits = device.waits_of_the_host
    with device.use(producer):
        for gradient, value in zip(gradients, values(0, rank), strict=True):
            gradient.copy_(value)
        before = [len(link.calls) for link in late.nccl.links]
        for index in (4, 3, 1, 0):
            reducer.mark_ready(index, gradients[index])
        begun = [len(link.calls) for link in late.nccl.links]
        assert device.waits_of_the_host == waits
        reducer.mark_ready(2, gradients[2])
        ended = [len(link.calls) for link in late.nccl.links]
    if size > 1 and late.backend == "nccl":
        # Of three buckets the first is begun with its last gradient; the third waits for the second, then both begin.
        assert (sum(begun) - sum(before), sum(ended) - sum(before)) == (1, 3)
    with device.use(producer):
        reducer.finish(gradients)
        seen = [each.clone() for each in gradients]
    device.drain(producer)
    for found, expected in zip(seen, total(0, size), strict=True):
        assert torch.equal(found, expected / size)
    reducer.drop()


def test_gradients_that_never_arrived_are_reduced_in_finish(late: Late) -> None:
    device, rank, size = late.device, late.hvd.rank(), late.hvd.size()
    reducer = PlannedReducer(entries(), ReductionSettings(Sum, size), name="late ones")
    for step in range(3):
        stream = device.new_stream(device.home())
        with device.use(stream):
            gradients = [each.clone() for each in values(step, rank)]
            reducer.mark_ready(1, gradients[1])
            reducer.finish(gradients)
            seen = [each.clone() for each in gradients]
        device.drain(stream)
        assert all(map(torch.equal, seen, total(step, size)))
    reducer.drop()


def test_a_timeline_shows_the_backend_of_the_device(late: Late, tmp_path: Path) -> None:
    device, rank, size = late.device, late.hvd.rank(), late.hvd.size()
    reducer = PlannedReducer(entries(), ReductionSettings(Sum, size), name="recorded")
    path = tmp_path / f"timeline {rank}.json"
    late.hvd.start_timeline(str(path))
    try:
        for step in range(2):
            user = device.new_stream(device.home())
            with device.use(user):
                gradients = [each.clone() for each in values(step, rank)]
                for index in (3, 4, 2, 1, 0):
                    reducer.mark_ready(index, gradients[index])
                reducer.finish(gradients)
                seen = [each.clone() for each in gradients]
            device.drain(user)
            assert all(map(torch.equal, seen, total(step, size)))
    finally:
        late.hvd.stop_timeline()
    reducer.drop()
    text = "".join(each.read_text() for each in tmp_path.iterdir())
    # A rank that is alone has nothing to reduce.
    assert size == 1 or f"{late.backend.upper()}_ALLREDUCE" in text

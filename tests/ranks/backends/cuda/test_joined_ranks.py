"""Ranks that have no more data contribute on the device too."""

import pytest
import torch
from ranks.backends.cuda.conftest import Late

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import device_of
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.transport.loop.coroutine import Coroutine

pytestmark = pytest.mark.mpi(min_size=2)


def test_single_reductions(late: Late) -> None:
    hvd, device = late.hvd, late.device
    goes_on = hvd.rank() < hvd.size() - 1
    user = device.new_stream(device.home())
    if goes_on:
        with device.use(user):
            tensor = torch.full((1000,), hvd.rank() + 1.0)
            hvd.allreduce_(tensor, op=hvd.Sum, name="after the last rank has joined")
            seen = tensor.clone()
        device.drain(user)
        assert torch.equal(seen, torch.full((1000,), float(sum(range(1, hvd.size())))))
    hvd.join()


def test_gradients(late: Late) -> None:
    hvd, rank, size = late.hvd, late.hvd.rank(), late.hvd.size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Sum
    )
    steps = 2 + rank
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 6), rank + step + 1.0)).sum().backward()
        optimizer.step()
        if step < 2:
            assert len(hvd.allgather_object(model[0].weight.sum().item())) == size
    hvd.join()
    weights = hvd.allgather(model[0].weight.detach().reshape(1, -1))
    # The last rank has made all steps; the others were given none of them after they had joined.
    assert not torch.equal(weights[0], weights[-1])
    torch.manual_seed(1)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(size + 1):
        single.zero_grad()
        for other in range(size):
            if step < 2 + other:
                alone(torch.full((3, 6), other + step + 1.0)).sum().backward()
        single.step()
    assert torch.allclose(weights[-1].reshape(30, 6), alone[0].weight, rtol=1e-4)


def test_what_stands_in_for_a_rank_goes_by_the_stream_of_its_program(late: Late) -> None:
    """It begins when that has written what it writes, too, and the program reads what it has written."""
    hvd, device = late.hvd, late.device
    source, user = hvd.size() - 1, device.new_stream(device.home())
    queue = PlannedQueue("test of a join", device=device.home())
    tensor, streams = torch.full((1000,), -1.0), set()

    def hand_out(*, active: bool) -> CountingJob:
        def job(backend: Backend) -> Coroutine[int]:
            streams.add(device_of(backend).stream)
            count = yield from backend.count_active(active)
            if count:
                yield from backend.gather([tensor.view(torch.uint8)], [source])
            return count

        return job

    queue.stand_in = lambda: hand_out(active=False)
    queue.agree()
    if hvd.rank() == source:
        with device.use(user):
            tensor.fill_(5.0)
            queue.run(hand_out(active=True))
    with device.tell(user):
        hvd.join()
    (stream,) = streams
    assert user in stream.waits_for
    assert stream in user.waits_for
    with device.use(user):
        seen = tensor.clone()
    device.drain(user)
    assert torch.equal(seen, torch.full((1000,), 5.0))
    queue.close()

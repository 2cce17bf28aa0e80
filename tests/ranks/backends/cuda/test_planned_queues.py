"""A planned queue on a device: its jobs run on the backend's stream, and the caller's stream waits for them."""

import torch
from ranks.backends.cuda.conftest import Late

from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import beside, device_of, home_of
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.transport.loop.coroutine import Coroutine


def test_jobs_of_a_queue_on_a_device(late: Late) -> None:
    device, rank, size = late.device, late.hvd.rank(), late.hvd.size()
    queue = PlannedQueue("test of a device", device=device.home())
    user = device.new_stream(device.home())
    parts: list[list[torch.Tensor]] = []

    def share(mine: torch.Tensor) -> CountingJob:
        def job(backend: Backend) -> Coroutine[int]:
            assert home_of(backend) == device.home()
            parts.append([torch.empty_like(mine) for _ in range(size)])
            parts[-1][rank].copy_(mine)
            yield from backend.gather([part.view(torch.uint8) for part in parts[-1]], range(size))
            return (yield from backend.count_active(rank > 0))

        return job

    for step in range(3):
        with device.use(user):
            assert queue.run(share(torch.full((2000,), 10.0 * step + rank))) == size - 1
            seen = [each.clone() for each in parts[-1]]
        device.drain(user)
        for sender, found in enumerate(seen):
            assert torch.equal(found, torch.full((2000,), 10.0 * step + sender))
    queue.close()


def test_hosts_may_talk_in_between(late: Late) -> None:
    queue = PlannedQueue("talk", device=late.device.home())
    flags = torch.zeros(late.hvd.size(), dtype=torch.uint8)
    flags[late.hvd.rank()] = late.hvd.rank() + 1

    def talk(host: Backend) -> Coroutine[list[int]]:
        assert device_of(host) is None
        yield from host.gather(list(flags.split(1)), range(late.hvd.size()))
        return flags.tolist()

    def job(backend: Backend) -> Coroutine[int]:
        return sum((yield from beside(backend, talk)))

    assert queue.run(job) == sum(range(1, late.hvd.size() + 1))
    queue.close()

"""A planned queue: one agreement, then steps without a message; a rank that has joined stands in for its part."""

import gc
import weakref
from types import ModuleType

import pytest
import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.collectives.requests.reduction import arithmetic_of
from hvlike.collectives.session.context import current
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.errors import MismatchError
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.transport.loop.coroutine import Coroutine, Wait

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi, pytest.mark.differs_by_overlap]


def adding(tensor: torch.Tensor, size: int, *, active: bool) -> CountingJob:
    """A job that sums a tensor up over the ranks."""
    arithmetic = arithmetic_of(tensor.dtype, ReduceOp.SUM, size, 1.0, 1.0)

    def run(backend: Backend) -> Coroutine[int]:
        yield from backend.allreduce([tensor], arithmetic)
        return (yield from backend.count_active(active))

    return run


class Adder:
    """A planned queue that sums up ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: list[torch.Tensor] = []
        self.queue = PlannedQueue("Adder", described={"length": 3})
        self.queue.stand_in = self.stand_in
        self.queue.agree()

    def step(self) -> int:
        tensor = torch.ones(3)
        active = self.queue.run(adding(tensor, self.size, active=True))
        assert tensor.tolist() == [active] * 3
        return active

    def stand_in(self) -> CountingJob:
        self.seen.append(torch.zeros(3))
        return adding(self.seen[-1], self.size, active=False)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_has_joined_sees_what_the_others_do(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    adder = Adder(size)
    queues = []
    for number in range(4):
        # Then inline reductions have their queue.
        hvd.allreduce(torch.ones(1), name=f"before {number}")
    for _ in range(3):
        # Rank r makes r steps: the rank 0 makes none, and agrees anew with the others without a call of its own.
        counts = [adder.step() for _ in range(rank)]
        assert counts == [size - 1 - step for step in range(rank)]
        hvd.join()
        seen = [int(tensor[0]) for tensor in adder.seen]
        # The last step has nobody.
        assert seen == [size - 1 - step for step in range(rank, size)]
        adder.seen.clear()
        queues.append(len(current().find_set(None, "test").queues.all()))
    assert queues[-1] == queues[0]


def test_a_queue_that_nobody_holds_is_gone_at_once(hvd: ModuleType) -> None:
    queue = PlannedQueue("Short")
    assert queue.run(adding(torch.ones(3), hvd.size(), active=True)) == hvd.size()
    queue.close()
    left = weakref.ref(queue)
    gc.disable()
    try:
        del queue
        # Else a rank could not join until the collector has run.
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.mpi(min_size=2)
def test_what_differs_is_named_on_every_rank(hvd: ModuleType) -> None:
    rank = hvd.rank()
    text = r"Mismatched shape of 'w' in 'Thing\.\d+': rank 0 has \[3\], rank 1 has \[4\]\. Shape it alike\."
    described = {"shape of 'v'": [2], "shape of 'w'": [3 if rank == 0 else 4]}
    queue = PlannedQueue("Thing", described=described, advice="Shape it alike.")
    with pytest.raises(MismatchError, match=text):
        queue.agree()
    order = ["a", "b"] if rank == 0 else ["b", "a"]
    with pytest.raises(MismatchError, match=r"Mismatched order .* rank 0 lists a, b, rank 1 lists b, a\."):
        PlannedQueue("Thing", described=dict.fromkeys(order, 1)).agree()


@pytest.mark.mpi(min_size=2)
def test_after_an_error_the_next_step_opens_another_queue(hvd: ModuleType) -> None:
    adder = Adder(hvd.size())
    adder.step()

    def failing(backend: Backend) -> Coroutine[int]:
        yield Wait.AGAIN
        raise ZeroDivisionError("in the job")

    with pytest.raises(ZeroDivisionError, match="in the job"):
        adder.queue.run(failing)
    assert adder.step() == hvd.size()


@pytest.mark.mpi(min_size=2)
def test_a_queue_that_cannot_stand_in_refuses_the_join_on_every_rank(hvd: ModuleType) -> None:
    queue = PlannedQueue("Rigid")
    queue.agree()
    with pytest.raises(ValueError, match=r"'Rigid\.\d+' is in use"):
        hvd.join()
    queue.stand_in = lambda: adding(torch.zeros(1), hvd.size(), active=False)
    hvd.join()

"""A thread that waits for a job takes its steps itself, and leaves them to the loop once it would have to wait long."""

import math
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike import Sum
from hvlike.backends.hierarchical import HierarchicalBackend
from hvlike.backends.network.cost_model import MeasuredNetwork
from hvlike.backends.operation import Operation
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.plan import Entry
from hvlike.collectives.session.context import current
from hvlike.errors import StateError
from hvlike.training.gradients.planned_reducer import PlannedReducer
from hvlike.transport.host import topology
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.loop.spin import SpinPolicy

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]

ELEMENTS = 1000


def waits_for(seconds: float) -> SpinPolicy:
    """A queue that goes by this leaves a job that does not move to the loop after so long."""
    policy = SpinPolicy(crowded=False)
    policy.queue_seconds = policy.network_seconds = seconds
    return policy


def test_no_thread_but_the_loops_driver_calls_mpi(hvd: ModuleType, ranks_per_node: int | None) -> None:
    """What a thread advances where messages are MPI's, it advances as the driver of the loop."""
    queue = current().find_set(None, "test").queues.first
    drivers: list[bool] = []

    def looking() -> Coroutine[None]:
        # A driver is told not to wait from inside its own loop.
        try:
            current().fabric.loop.wait(lambda: True)
            drivers.append(False)
        except StateError:
            drivers.append(True)
        yield Wait.AGAIN

    if queue.drives:
        # Where another thread drives the loop, that one does it.
        operation = queue.run(lambda backend: looking(), drive=True)
        assert current().fabric.loop.wait(operation.done, 30.0)
        assert drivers == [not isinstance(queue.backend, SharedBackend)]


@pytest.fixture
def reducer(hvd: ModuleType) -> Iterator[PlannedReducer]:
    entries = [Entry(str(index), (ELEMENTS,), torch.float32, torch.device("cpu")) for index in range(3)]
    made = PlannedReducer(entries, ReductionSettings(Sum, hvd.size()), name="test.driving")
    yield made
    made.close()


def some_rank_overlaps(hvd: ModuleType) -> bool:
    """Whether buckets may start early on a rank: one that is alone on its node has more cores."""
    return any(hvd.allgather_object(current().overlaps))


def step(reducer: PlannedReducer, size: int) -> None:
    tensors = [torch.full((ELEMENTS,), float(index)) for index in range(3)]
    reducer.finish(tensors)
    assert all(bool((tensor == index * size).all()) for index, tensor in enumerate(tensors))


@pytest.mark.mpi(min_size=2)
def test_a_planned_step_needs_no_loop_where_all_come_at_once(
    hvd: ModuleType, reducer: PlannedReducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(reducer, hvd.size())
    assert reducer.schedule is not None
    queue: Any = reducer.schedule.queue
    if not isinstance(queue.backend, SharedBackend) or some_rank_overlaps(hvd):
        pytest.skip("the background thread may drive the loop already, or start buckets where there are cores to spare")
    ended: list[bool] = []
    real = queue.run

    def run(*job: Any, **how: Any) -> Operation:
        operation: Operation = real(*job, **how)
        ended.append(operation.done())
        return operation

    monkeypatch.setattr(queue, "run", run)
    queue.spin = waits_for(math.inf)
    for _ in range(5):
        step(reducer, hvd.size())
    assert ended == [True] * 5
    assert reducer.served == 6


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_late_is_waited_for_in_the_loop(hvd: ModuleType, reducer: PlannedReducer) -> None:
    for late in range(hvd.size()):
        step(reducer, hvd.size())
        if hvd.rank() == late:
            time.sleep(0.2)
    assert reducer.served == hvd.size()


@pytest.mark.mpi(min_size=2)
def test_an_error_in_the_middle_loses_the_plan_and_the_next_step_makes_one(
    hvd: ModuleType, reducer: PlannedReducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(reducer, hvd.size())
    assert reducer.schedule is not None
    queue = reducer.schedule.queue

    def interrupted(operation: Operation) -> None:
        raise KeyboardInterrupt

    # Across nodes the background thread may drive the loop, and so the job.
    if isinstance(queue.backend, SharedBackend) and not some_rank_overlaps(hvd):
        with monkeypatch.context() as patch:
            patch.setattr(Operation, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(reducer, hvd.size())
        assert isinstance(queue.broken, KeyboardInterrupt)
        assert reducer.schedule is None
    step(reducer, hvd.size())
    assert reducer.healthy


@pytest.mark.mpi(min_size=2)
def test_on_a_slow_network_buckets_start_during_backward_without_a_spare_core(
    hvd: ModuleType, ranks_per_node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks_per_node != 1 or current().knobs.overlap is not None:
        pytest.skip("needs one rank a node, and that nothing is set")
    monkeypatch.setattr(topology, "runnable_threads", lambda: 1 << 20)
    monkeypatch.setattr(HierarchicalBackend, "slow", True)
    monkeypatch.setattr(MeasuredNetwork, "is_slow", True)
    torch.manual_seed(0)
    width, layers = 700, 4
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0), model.named_parameters(), op=hvd.Sum)
    early = []
    for step in range(15):
        optimizer.zero_grad()
        model(torch.full((2, width), float(hvd.rank() + step))).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        # Of linear layers without biases the gradients are linear in the input.
        total = torch.full((2, width), float(sum(rank + step for rank in range(hvd.size()))))
        (alone,) = torch.autograd.grad(model(total).sum(), model[0].weight)
        assert torch.allclose(model[0].weight.grad, alone, rtol=1e-3, atol=1e-3)
        planned = [
            each for each in current().find_set(None, "test").proxies.planned if isinstance(each, PlannedReducer)
        ]
        of_the_model = [(width, width)] * layers
        early += [
            reducer.overlaps
            for reducer in planned
            if [tuple(entry.shape) for entry in reducer.proposal.entries] == of_the_model
        ]
    # First because the system allows two cores, if it does; then nothing, as all are in use; then as it is slow.
    assert len(early) == 15
    assert not early[topology.FIRST_LOOKS + 1 if current().overlaps else 0]
    assert early[-1]

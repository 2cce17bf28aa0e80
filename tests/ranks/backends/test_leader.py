"""The first rank of a node reduces and crosses for the others: right sums and counts, and nobody left waiting."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.pretended_nodes import nodes_of

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.op_queue import OpQueue, open_queue
from hvlike.backends.shared_memory import shared_backend
from hvlike.backends.shared_memory.leader import FlatBuffer, LeaderByCma, LeaderByStaging, NodeReduction
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.collectives.session.context import current
from hvlike.errors import HorovodInternalError
from hvlike.transport.loop.coroutine import Coroutine

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.differs_by_ranks(4)]

SHAPES = (5, 300, 70_000)


@pytest.fixture
def _two_ranks_a_node(hvd: ModuleType) -> Iterator[None]:
    with nodes_of(hvd, 2):
        yield


def opened(number: int) -> OpQueue:
    fabric, group = current().fabric, current().find_set(None, "test").group
    task = fabric.loop.start(open_queue(fabric, group, number), wake=False)
    assert fabric.loop.wait(lambda: task.done, 30.0)
    assert task.result is not None
    return task.result


def run(queue: OpQueue, tensors: list[torch.Tensor], arithmetic: Arithmetic, active: int) -> int:
    def job(backend: Backend) -> Coroutine[int]:
        prepared = backend.prepare([len(each) for each in tensors], arithmetic)
        assert prepared is not None
        return (yield from prepared.run([each.data_ptr() for each in tensors], bool(active), tensors))

    operation = queue.run(job)
    operation.waiter = current().fabric.loop.wait
    count: int = operation.result(30.0)
    return count


@pytest.mark.parametrize("way", [LeaderByCma, LeaderByStaging], ids=["CMA", "staged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_two_ranks_a_node")
def test_sums_and_active_ranks_step_after_step(
    hvd: ModuleType, dtype: torch.dtype, way: type[NodeReduction], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NodeReduction] = []
    by_leader = SharedBackend.by_leader

    def recorded(self: SharedBackend, lengths: list[int], arithmetic: Arithmetic, flat: FlatBuffer) -> NodeReduction:
        made.append(by_leader(self, lengths, arithmetic, flat))
        return made[-1]

    monkeypatch.setattr(SharedBackend, "by_leader", recorded)
    if way is LeaderByStaging:
        # As where a rank can post no address.
        monkeypatch.setattr(shared_backend, "ADDRESSES", 0)
    queue = opened(78_100)
    arithmetic = Arithmetic(dtype, ReduceOp.AVERAGE, divisor=hvd.size())
    for step in range(4):
        tensors = [torch.full((length,), float(hvd.rank() + step), dtype=dtype) for length in SHAPES]
        assert run(queue, tensors, arithmetic, active=hvd.rank() <= step) == min(step + 1, hvd.size())
        mean = torch.tensor(sum(rank + step for rank in range(hvd.size())) / hvd.size()).to(dtype)
        assert all(bool((each == mean).all()) for each in tensors)
    reaches = current().fabric.reaches_peers
    assert all(isinstance(each, way) for each in made) or (way is LeaderByCma and not reaches)
    current().fabric.loop.perform(queue.close)


@pytest.mark.usefixtures("_two_ranks_a_node")
def test_an_error_of_a_leader_ends_the_wait_of_its_whole_node(hvd: ModuleType) -> None:
    """The nodes reduce different things: only the leaders can see that."""
    queue = opened(78_200)
    length = 6 if hvd.cross_rank() else 5
    with pytest.raises(HorovodInternalError):
        run(queue, [torch.ones(length)], Arithmetic(torch.float32, ReduceOp.SUM), active=1)

"""hvd.statistics: bytes, batches and waits are counted, and what is not over is named."""

import dataclasses
from types import ModuleType

import pytest
import torch

from hvlike import Statistics
from hvlike.observe.counters import Counters, Moved, Waits

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]


def since(hvd: ModuleType, before: Statistics, kind: str) -> tuple[int, int]:
    """Operations and bytes of a kind, whichever way they went."""
    now = hvd.statistics()
    old, new = before.operations.get(kind, Moved()), now.operations.get(kind, Moved())
    operations, nbytes = new.operations - old.operations, new.bytes - old.bytes
    if kind == "allreduce":
        operations += now.express_operations - before.express_operations
        nbytes += now.express_bytes - before.express_bytes
    return operations, nbytes


@pytest.mark.pure
def test_the_largest_batch_and_the_means_are_known() -> None:
    counters = Counters()
    counters.ran("allreduce", 3, 1200)
    counters.ran("allreduce", 1, 4000)
    counters.waited("one", 0.5)
    counters.waited("one", 0.25)
    moved = counters.moved()["allreduce"]
    assert moved == Moved(4, 2, 5200, 3, 4000)
    assert (moved.operations_per_batch, moved.bytes_per_batch) == (2.0, 2600.0)
    assert (Moved().operations_per_batch, Moved().bytes_per_batch) == (0.0, 0.0)
    assert counters.waits() == {"one": Waits(2, 0.75, 0.25, 0.5)}


def test_operations_count_with_their_bytes_whichever_way_they_go(hvd: ModuleType) -> None:
    before = hvd.statistics()
    for _ in range(6):
        hvd.allreduce(torch.ones(10))
    assert since(hvd, before, "allreduce") == (6, 240)
    hvd.grouped_allreduce([torch.ones(5), torch.ones(5, dtype=torch.float64)])
    assert since(hvd, before, "allreduce") == (7, 300)
    hvd.broadcast(torch.ones(4), root_rank=0)
    assert since(hvd, before, "broadcast") == (1, 16)
    now = hvd.statistics()
    assert (now.rank, now.size) == (hvd.rank(), hvd.size())
    assert now.bytes == before.bytes + 316
    assert now.batches > before.batches
    assert now.seconds > before.seconds


def test_gradients_count_as_buckets_and_their_waits_by_name(hvd: ModuleType) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = hvd.statistics()
    for _ in range(4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    now = hvd.statistics()
    # Alone a rank has nothing to reduce.
    steps = 4 if hvd.size() > 1 else 0
    assert now.gradients.bytes - before.gradients.bytes == steps * 32
    assert now.gradients.operations - before.gradients.operations == steps * 2
    new = {name: each for name, each in now.waits.items() if name not in before.waits}
    assert [each.waits for each in new.values()] == ([4] if steps else [])
    for each in new.values():
        assert 0 <= each.longest_seconds <= each.seconds
    assert now.wait_seconds >= before.wait_seconds


@pytest.mark.mpi(min_size=2)
def test_the_oldest_unfinished_tensor_is_named(hvd: ModuleType) -> None:
    before = hvd.statistics().unfinished
    handle = hvd.allreduce_async(torch.ones(3, 2), name="alone for a while") if hvd.rank() == 0 else None
    if hvd.rank() == 0:
        oldest = hvd.statistics().oldest
        assert oldest is not None
        assert (oldest.kind, oldest.name, oldest.process_set) == ("allreduce", "alone for a while", 0)
        assert "test_statistics.py" in oldest.place
        assert oldest.tensors == "float32 [3, 2]"
        assert hvd.statistics().unfinished == before + 1
        assert "the oldest: allreduce 'alone for a while' of" in str(hvd.statistics())
    # Only now do the others ask for it.
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(3, 2), name="alone for a while")
    hvd.synchronize(handle)
    assert hvd.statistics().unfinished == before
    assert hvd.statistics().oldest is None


def test_the_record_is_frozen_and_reads_well(hvd: ModuleType) -> None:
    hvd.grouped_allreduce([torch.ones(2), torch.ones(2)])
    record = hvd.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.rank = 7
    text = str(record)
    assert text.startswith(f"rank {hvd.rank()} of {hvd.size()}, ")
    assert "  allreduce: " in text
    assert text.splitlines()[-1].startswith("  unfinished: 0")

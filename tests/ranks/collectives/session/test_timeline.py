"""The timeline of a running job: phases of named operations and of planned buckets, arrows, start and stop."""

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike.observe.recorder import path_of_rank

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]

Event = dict[str, Any]


class Timeline:
    """What one rank has recorded."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = json.loads(path.read_text())["traceEvents"]
        named = [event for event in self.events if event["ph"] == "M" and event["name"] == "thread_name"]
        self.titles = {event["tid"]: event["args"]["name"] for event in named}

    def row(self, title: str) -> list[Event]:
        """The events of a row, in the order of time."""
        found = [event for event in self.events if event["ph"] != "M" and self.titles.get(event["tid"]) == title]
        return sorted(found, key=lambda event: event["ts"])

    def phases(self, title: str) -> list[str]:
        """What began in a row, each of which must have ended."""
        begun, open_phases = [], []
        for event in self.row(title):
            if event["ph"] == "B":
                begun.append(event["name"])
                open_phases.append(event)
            elif event["ph"] == "E":
                open_phases.pop()
        assert not open_phases
        return begun


@pytest.fixture
def record(hvd: ModuleType, tmp_path: Path) -> Callable[..., list[Timeline]]:
    """Runs something with the timeline on and returns what every rank has recorded."""

    def run(work: Callable[[], None], mark_cycles: bool = False) -> list[Timeline]:
        folder = hvd.broadcast_object(str(tmp_path), name="folder")
        path = str(Path(folder) / "timeline.json")
        hvd.start_timeline(path, mark_cycles=mark_cycles)
        hvd.barrier()
        work()
        hvd.barrier()
        hvd.stop_timeline()
        hvd.barrier()
        timelines = [Timeline(Path(path_of_rank(path, rank))) for rank in range(hvd.size())]
        hvd.barrier()
        return timelines

    return run


def test_a_named_operation_has_a_row_with_its_phases(hvd: ModuleType, record: Callable[..., list[Timeline]]) -> None:
    def work() -> None:
        hvd.allreduce(torch.ones(3, 4), name="x", op=hvd.Sum)
        hvd.broadcast(torch.ones(2), 0, name="y")

    for timeline in record(work):
        assert timeline.phases("allreduce.x") == ["NEGOTIATE_ALLREDUCE", "QUEUE", "ALLREDUCE"]
        assert timeline.phases("broadcast.y") == ["NEGOTIATE_BROADCAST", "QUEUE", "BROADCAST"]
        negotiation = next(event for event in timeline.row("allreduce.x") if event["ph"] == "B")
        expected = {"process_set": 0, "bytes": 48, "dtype": "float32", "shape": [[3, 4]], "op": "Sum"}
        assert negotiation["args"] == expected
        queue = timeline.phases("set 0 queue 0")
        assert queue.index("ALLREDUCE") < queue.index("BROADCAST")
        assert any(phase.endswith("_ALLREDUCE") for phase in queue)


def test_the_coordinator_shows_who_was_ready_and_its_cycles(
    hvd: ModuleType, record: Callable[..., list[Timeline]]
) -> None:
    timelines = record(lambda: hvd.allreduce(torch.ones(3), name="x"), True)
    ready = [event["name"] for event in timelines[0].row("allreduce.x") if event["ph"] == "i"]
    assert sorted(ready) == [str(rank) for rank in range(hvd.size())]
    assert any(event["name"] == "CYCLE_START" for event in timelines[0].row("set 0 coordinator"))
    assert not any(event.get("name") == "CYCLE_START" for other in timelines[1:] for event in other.events)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_was_ready_before_the_coordinator_is_marked_too(
    hvd: ModuleType, record: Callable[..., list[Timeline]]
) -> None:
    def work() -> None:
        time.sleep(0.0 if hvd.rank() else 0.2)
        hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="x"))

    row = record(work)[0].row("allreduce.x")
    assert sorted(event["name"] for event in row if event["ph"] == "i") == [str(rank) for rank in range(hvd.size())]


def test_arrows_lead_from_the_last_rank_to_all_others(hvd: ModuleType, record: Callable[..., list[Timeline]]) -> None:
    def work() -> None:
        for index in range(5):
            hvd.allreduce(torch.ones(3), name=f"x{index}")

    timelines = record(work)
    for index in range(5):
        found = [event for each in timelines for event in each.row(f"allreduce.x{index}")]
        starts = {event["id"]: event["pid"] for event in found if event["ph"] == "s"}
        ends = {event["id"]: event["pid"] for event in found if event["ph"] == "f"}
        assert starts.keys() == ends.keys()
        assert len(set(starts.values())) == min(1, hvd.size() - 1)
        assert sorted({*starts.values(), *ends.values()}) == (list(range(hvd.size())) if hvd.size() > 1 else [])


def test_small_tensors_show_the_way_through_the_fusion_buffer(
    hvd: ModuleType, record: Callable[..., list[Timeline]]
) -> None:
    def work() -> None:
        hvd.grouped_allreduce([torch.ones(3), torch.ones(4)], name="pair")

    for timeline in record(work):
        queue = timeline.phases("set 0 queue 0")
        start = queue.index("MEMCPY_IN_FUSION_BUFFER")
        assert queue[start - 1] == "ALLREDUCE"
        assert queue[start + 1].endswith("_ALLREDUCE")
        assert queue[start + 2] == "MEMCPY_OUT_FUSION_BUFFER"


def test_unnamed_operations_share_rows(hvd: ModuleType, record: Callable[..., list[Timeline]]) -> None:
    def work() -> None:
        for _ in range(10):
            hvd.synchronize(hvd.allreduce_async(torch.ones(3)))

    for timeline in record(work):
        rows = [title for title in timeline.titles.values() if title.startswith("allreduce (unnamed)")]
        assert rows == ["allreduce (unnamed) 1"]
        assert timeline.phases(rows[0]) == ["NEGOTIATE_ALLREDUCE", "QUEUE", "ALLREDUCE"] * 10


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_is_in_its_row(hvd: ModuleType, record: Callable[..., list[Timeline]]) -> None:
    def work() -> None:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(hvd.rank() + 1), name="wrong")

    for timeline in record(work):
        assert timeline.phases("allreduce.wrong") == ["NEGOTIATE_ALLREDUCE"]
        assert "Mismatched" in timeline.row("allreduce.wrong")[-1]["args"]["error"]


@pytest.mark.mpi(min_size=2)
def test_the_steps_of_an_optimizer_show_buckets_and_waits(
    hvd: ModuleType, record: Callable[..., list[Timeline]]
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    def work() -> None:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for timeline in record(work):
        waits = [title for title in timeline.titles.values() if title.startswith("step of ")]
        assert len(waits) == 1
        assert timeline.phases(waits[0]) == ["WAIT"] * 3
        assert [event["args"]["step"] for event in timeline.row(waits[0]) if event["ph"] == "B"] == [0, 1, 2]
        queues = [
            title for title in timeline.titles.values() if title.startswith("set 0 queue ") and title[-2:] != " 0"
        ]
        buckets = [event for event in timeline.row(queues[0]) if event.get("name") == "BUCKET 0"]
        assert [event["args"]["bytes"] for event in buckets] == [4 * 8] * 3
        timeline.phases(queues[0])


def test_it_may_start_and_stop_while_operations_are_in_flight(
    hvd: ModuleType, record: Callable[..., list[Timeline]], tmp_path: Path
) -> None:
    early = [hvd.allreduce_async(torch.ones(3), name=f"early{index}") for index in range(3)]
    late: list[Any] = []

    def work() -> None:
        for handle in early:
            hvd.synchronize(handle)
        late.extend(hvd.allreduce_async(torch.ones(3), name=f"late{index}") for index in range(3))

    record(work)
    again = record(lambda: [hvd.synchronize(handle) for handle in late])
    for timeline in again:
        assert not [title for title in timeline.titles.values() if "late" in title]
    hvd.stop_timeline()


def test_wrong_starts_are_refused_on_the_rank_that_makes_them(hvd: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    hvd.start_timeline(path)
    with pytest.raises(ValueError, match="already"):
        hvd.start_timeline(tmp_path / "other.json")
    hvd.stop_timeline()
    with pytest.raises(ValueError, match="cannot be written"):
        hvd.start_timeline(tmp_path / "no" / "t.json")
    with pytest.raises(ValueError, match="expected the path of a file, got int"):
        hvd.start_timeline(3)
    assert hvd.stop_timeline() is None
    hvd.barrier()


def test_what_is_off_allocates_nothing_that_lasts(hvd: ModuleType) -> None:
    def work() -> None:
        for _ in range(50):
            hvd.allreduce(torch.ones(3), name="x")

    work()
    filters = [tracemalloc.Filter(True, f"*/{name}.py") for name in ("recorder", "trace", "traced", "trace_file")]
    tracemalloc.start()
    try:
        work()
        after = tracemalloc.take_snapshot().filter_traces(filters)
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in after.traces) < 200

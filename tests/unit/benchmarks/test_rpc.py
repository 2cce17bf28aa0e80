"""bench rpc: the same work for every contestant, tables and pictures of all of it."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.bench.some_conditions import CONDITIONS

from benchmarks.rpc import MPI, OURS, TENSORPIPE, Result, as_text, panels
from benchmarks.rpc_session import Idle, Rate, Trip, start_tensorpipe
from hvlike.errors import HvlikeError

RESULTS = [
    Result(Trip(0), {OURS: [[1e-4], [3e-4], [2e-4]], TENSORPIPE: [[4e-4], [6e-4], [4e-4]], MPI: [[2e-5]] * 3}),
    Result(Rate(64), {OURS: [[1e-4]] * 3, TENSORPIPE: [[2e-4]] * 3}),
    Result(Idle(2.0), {OURS: [[0.001, 0.002]], TENSORPIPE: [[1.0, 0.99]]}),
]


class Local:
    """Calls that never leave the process."""

    def __init__(self, wrong: bool = False) -> None:
        self.most = self.open = self.calls = 0
        self._wrong = wrong

    def rpc_sync(self, to: int, function: Any, args: Any = ()) -> Any:
        assert to == 1
        self.calls += 1
        answer = function(*args)
        return answer + 1 if self._wrong else answer

    def rpc_async(self, to: int, function: Any) -> Any:
        self.open += 1
        self.most = max(self.most, self.open)

        def wait() -> None:
            self.open -= 1
            self.calls += 1

        return SimpleNamespace(wait=wait)


def rpc(local: Local) -> Any:
    return SimpleNamespace(__name__="local", rpc_sync=local.rpc_sync, rpc_async=local.rpc_async)


@pytest.mark.parametrize("size", [0, 1 << 10, 4 << 20])
def test_a_trip_counts_its_calls_but_not_the_warm_ups(size: int) -> None:
    local, work = Local(), Trip(size)
    samples = work.measure(rpc(local))
    assert len(samples) == work.trips
    assert local.calls == work.trips + work.warm_ups + (size > 0)


def test_large_tensors_are_sent_a_few_times_only() -> None:
    assert (Trip(0).trips, Trip(4 << 20).trips, Trip(256 << 20).trips) == (200, 64, 1)
    assert Trip(256 << 20).warm_ups == 1


def test_a_wrong_echo_is_no_result() -> None:
    with pytest.raises(HvlikeError, match="local: the echo of 1 KiB is not what was sent"):
        Trip(1 << 10).measure(rpc(Local(wrong=True)))


@pytest.mark.parametrize("in_flight", [1, 64])
def test_so_many_calls_are_in_flight_and_no_more(in_flight: int) -> None:
    local = Local()
    (seconds,) = Rate(in_flight).measure(rpc(local))
    assert seconds > 0
    assert (local.most, local.open) == (in_flight, 0)


def test_idle_time_is_a_part_of_a_core_for_each_rank() -> None:
    used = Idle(0.05).measure(rpc(Local()))
    assert len(used) == 2
    assert all(each >= 0 for each in used)


def test_tensorpipe_is_left_out_on_request() -> None:
    assert start_tensorpipe([[0], [1]], "left out by --no-tensorpipe") == "left out by --no-tensorpipe"


def test_reports_show_every_contestant() -> None:
    text = as_text({**CONDITIONS, "left_out": ["Without gloo: it has no calls."]}, RESULTS)
    assert "200 us" in text
    assert "0.50 [0.38, 0.50]" in text
    assert "10,000" in text
    assert "0.20%" in text
    assert "Without gloo" in text
    found = RESULTS[0].as_json()
    assert found["work"] == "empty call"
    assert found["found"][OURS][0]["samples"] == [1e-4, 3e-4, 2e-4]
    assert found["ratios"]["hvlike/TensorPipe"]["of_medians"] == pytest.approx(0.5)
    assert RESULTS[2].as_json()["found"][TENSORPIPE][1]["median"] == 0.99


def test_pictures_show_every_contestant() -> None:
    trips, rates, ratios, idle = panels(RESULTS)
    assert set(trips.series) == {OURS, TENSORPIPE, MPI}
    assert rates.heights[OURS] == pytest.approx([1e4])
    assert list(ratios.series) == ["hvlike/TensorPipe", "hvlike/MPI"]
    assert idle.heights[TENSORPIPE] == [100.0, 99.0]


def test_a_report_without_others_has_no_ratios() -> None:
    alone = [Result(each.work, {OURS: each.samples[OURS]}) for each in RESULTS]
    assert "hvlike/" not in as_text(CONDITIONS, alone)
    assert len(panels(alone)) == 3

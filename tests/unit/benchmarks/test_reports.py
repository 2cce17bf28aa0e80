"""Benchmarks of developers: the same work for every contestant, and all of it in tables and pictures."""

import argparse
import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bench.some_conditions import CONDITIONS
from torch import Tensor

from benchmarks import autograd, kernels, recovery, rpc, scaling, waiting, zero
from benchmarks.rpc_session import Idle, Rate, Step, Trip, half
from hvlike.errors import HvlikeError
from hvlike.transport.messages.traffic import Sent

CALLS = [
    rpc.Result(
        Trip(0), {rpc.OURS: [[1e-4], [3e-4], [2e-4]], rpc.TENSORPIPE: [[4e-4], [6e-4], [4e-4]], rpc.MPI: [[2e-5]] * 3}
    ),
    rpc.Result(Rate(64), {rpc.OURS: [[1e-4]] * 3, rpc.TENSORPIPE: [[2e-4]] * 3}),
    rpc.Result(Idle(2.0), {rpc.OURS: [[0.001, 0.002]], rpc.TENSORPIPE: [[1.0, 0.99]]}),
]


class LocalCalls:
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


def as_module(local: LocalCalls) -> Any:
    return SimpleNamespace(__name__="local", rpc_sync=local.rpc_sync, rpc_async=local.rpc_async)


@pytest.mark.parametrize("size", [0, 1 << 10, 4 << 20])
def test_a_trip_counts_its_calls_but_not_the_warm_ups(size: int) -> None:
    local, work = LocalCalls(), Trip(size)
    samples = work.measure(as_module(local))
    assert len(samples) == work.trips
    assert local.calls == work.trips + work.warm_ups + (size > 0)


def test_a_wrong_echo_is_no_result() -> None:
    with pytest.raises(HvlikeError, match="local: the echo of 1 KiB is not what was sent"):
        Trip(1 << 10).measure(as_module(LocalCalls(wrong=True)))


@pytest.mark.parametrize("in_flight", [1, 64])
def test_so_many_calls_are_in_flight_and_no_more(in_flight: int) -> None:
    local = LocalCalls()
    (seconds,) = Rate(in_flight).measure(as_module(local))
    assert seconds > 0
    assert (local.most, local.open) == (in_flight, 0)


def test_a_report_without_others_has_no_ratios() -> None:
    alone = [rpc.Result(each.work, {rpc.OURS: each.samples[rpc.OURS]}) for each in CALLS]
    assert "hvlike/" not in rpc.as_text(CONDITIONS, alone)
    assert len(rpc.panels(alone)) == 3


STEP = Step(4, 3, 1)
STEPS = [
    autograd.Result(
        STEP,
        {
            autograd.SAFE: [1e-4, 3e-4, 2e-4],
            autograd.SMART: [2e-4] * 3,
            autograd.TENSORPIPE: [4e-4, 6e-4, 4e-4],
            autograd.ALONE: [2e-5] * 3,
        },
    ),
    autograd.Result(Step(4, 3, 1, unused=10), {autograd.SAFE: [4e-4] * 3, autograd.SMART: [1e-4] * 3}),
]
ANALYSES = [autograd.Analysis(100, 1e-3, 1e-4, 5e-5)]


class LocalGraphs:
    """Calls and contexts that never leave the process."""

    def __init__(self, factor: float = 1.0) -> None:
        self.__name__ = "local"
        self.calls = self.backwards = 0
        self._factor = factor
        self._found: dict[Tensor, Tensor] = {}

    def rpc_sync(self, to: int, function: Any, args: Any) -> Any:
        assert to == 1
        self.calls += 1
        return function(*args)

    @contextmanager
    def context(self) -> Any:
        yield 7

    def backward(self, context: int, roots: list[Tensor]) -> None:
        assert context == 7
        self.backwards += 1
        parameters = list(half(STEP.shape, 0).parameters())
        found = torch.autograd.grad(roots[0], parameters)
        self._found = {parameter: self._factor * each for parameter, each in zip(parameters, found, strict=True)}

    def get_gradients(self, context: int) -> dict[Tensor, Tensor]:
        return self._found


def modules(local: LocalGraphs) -> tuple[Any, Any]:
    names = {name: getattr(local, name) for name in ("context", "backward", "get_gradients", "__name__")}
    return SimpleNamespace(rpc_sync=local.rpc_sync), SimpleNamespace(**names)


@pytest.mark.parametrize("unused", [0, 2])
def test_a_step_is_forward_backward_and_gradients(unused: int) -> None:
    local = LocalGraphs()
    step = Step(4, 3, 1, unused)
    samples = step.measure(*modules(local))
    assert 5 <= len(samples) <= 100
    assert all(each > 0 for each in samples)
    assert local.calls == (1 + unused) * local.backwards
    # One that is checked, three that are not timed.
    assert local.backwards == len(samples) + 4


def test_wrong_gradients_are_no_result() -> None:
    with pytest.raises(HvlikeError, match=r"local: wrong gradients of 1\+1 layers of 4, batch 3"):
        STEP.measure(*modules(LocalGraphs(factor=1.1)))


COORDINATOR = scaling.RankCounts(Sent({"responses": 12}, 1200, 4, 400, 2, 80), [0.1, 0.2, 0.3, 0.4])
MEMBER = scaling.RankCounts(Sent({"ready": 4}, 400, 8, 800, 2, 80), [0.5, 0.1, 0.2, 0.3])
OF_SCALING = {"tensors": 8, "bytes": 4096, "steps": 4, "cores": 2, "ranks_per_node": None, "launcher": "/bin/mpirun"}


def test_counts_are_per_step_and_rank() -> None:
    way = scaling.summarise([COORDINATOR, MEMBER], steps=4)
    assert (way.control, way.most_control, way.control_bytes) == (2.0, 3.0, 200.0)
    assert way.kinds == {"ready": 0.5, "responses": 1.5}
    assert way.seconds == pytest.approx(0.35)  # Of the slowest rank: of 0.5, 0.2, 0.3, 0.4
    assert (way.data_messages, way.data_bytes, way.collectives, way.collective_bytes) == (1.5, 150.0, 0.5, 20.0)


def test_the_table_names_what_is_odd() -> None:
    calm = scaling.summarise([COORDINATOR, MEMBER], steps=4)
    late = scaling.summarise([COORDINATOR, scaling.RankCounts(Sent({"waiting": 1}, 100), MEMBER.seconds)], steps=4)
    assert "waited for half a second" not in scaling.as_text(OF_SCALING, [scaling.Result(2, 1, {"negotiated": calm})])
    text = scaling.as_text({**OF_SCALING, "ranks_per_node": 2}, [scaling.Result(2, 1, {"negotiated": late})])
    assert "waited for half a second" in text
    assert "nodes emulated: 2 ranks each" in text


BEFORE = [("resumed", 1.0), ("step", 2.0), ("step", 2.5), ("commit", 2.75)]
SURVIVOR = [*BEFORE, ("step", 9.9), ("noticed", 10.1), ("rebuilt", 10.2), ("resumed", 10.5), ("step", 10.6)]
SLOWER = [*BEFORE, ("noticed", 10.4), ("rebuilt", 10.45), ("resumed", 10.5), ("step", 10.55)]
SPARE = [("rebuilt", 10.4), ("resumed", 10.9), ("step", 11.0)]


def test_the_last_process_counts() -> None:
    with_spare = recovery.read([SURVIVOR, SPARE], 10.0)
    assert list(with_spare.phases.values()) == pytest.approx([0.1, 0.3, 0.5, 0.1])
    found = recovery.read([SURVIVOR, SLOWER], 10.0)
    assert list(found.phases.values()) == pytest.approx([0.4, 0.05, 0.05, 0.1])
    assert found.total == pytest.approx(0.6)
    assert found.commits == [0.25, 0.25]


def test_a_phase_that_ended_before_the_one_before_it_took_no_time() -> None:
    late = [("noticed", 10.8), ("rebuilt", 10.9), ("resumed", 11.0), ("step", 11.1)]
    early = [("noticed", 10.1), ("rebuilt", 10.2), ("resumed", 10.3), ("step", 10.4)]
    assert all(seconds >= 0 for seconds in recovery.read([late, early], 10.0).phases.values())


def test_one_rank_is_refused() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    recovery.add_arguments(parser)
    with pytest.raises(argparse.ArgumentError, match="nobody is left"):
        parser.parse_args(["--ranks", "1"])


SECONDS = {
    waiting.NOTHING: [1.0, 2.0],
    waiting.AGAIN: [1.0, 2.0],
    waiting.NAMED: [1.5, 2.0],
    waiting.PLANNED: [2.0, 4.0],
}
FOUND = {waiting.FREE: {"slowdown": {"matmul": waiting.ratios(SECONDS)}, "latency": {"matmul": [1e-4, 3e-4, 2e-4]}}}


def test_work_is_repeated_to_take_the_time_it_shall() -> None:
    calls = []
    run = waiting.repeated(lambda: calls.append(0), 0.001)
    calls.clear()
    run()
    assert len(calls) > 1
    assert len(waiting.works()) == 4


ADDED = kernels.Result(
    "float32", 4 << 20, {"hvlike, 1": [4e-3, 4e-3, 4e-3], "hvlike, 2": [2e-3, 3e-3, 2e-3], kernels.NUMPY: [3e-3] * 3}
)


RESULT = zero.Result(
    elements=1000,
    tensors=3,
    state={zero.ADAM: [8000, 8000], zero.ZERO: [4400, 3600], zero.ALONE: [4400, 3600]},
    gradients={zero.ADAM: [4000, 4000], zero.ZERO: [4000, 4000], zero.ALONE: [2200, 1800]},
    seconds={zero.ADAM: [2e-3, 3e-3, 4e-3], zero.ZERO: [1e-3, 3e-3, 2e-3], zero.ALONE: [1e-3] * 3},
)


def test_no_tensor_of_the_model_is_a_tenth_of_it() -> None:
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in zero.shapes_of(640, 10)]
    assert 50e6 < sum(sizes) < 52e6
    assert max(sizes) < sum(sizes) / 10


def recovered() -> list[recovery.Result]:
    once = recovery.Recovery(dict.fromkeys(recovery.PHASES, 0.1), [0.01])
    return [recovery.Result(way, 1 << 20, [once, once]) for way in ("shrink", "spare")]


def texts() -> dict[str, tuple[str, list[str]]]:
    """What each benchmark prints, and words of it."""
    left_out = {**CONDITIONS, "left_out": ["Without gloo: it has no calls."]}
    few = dict.fromkeys(("ranks", "cores", "mpi", "hvlike", "torch", "python", "repetitions"), 3)
    return {
        "rpc": (rpc.as_text(left_out, CALLS), ["200 us", "0.50 [0.38, 0.50]", "10,000", "0.20%", "Without gloo"]),
        "autograd": (
            autograd.as_text(left_out, STEPS, ANALYSES),
            ["200 us", "0.50 [0.38, 0.50]", "10 unused results", "100 us (10%)", "Without gloo"],
        ),
        "recovery": (recovery.as_text(few, recovered()), [*recovery.PHASES, "400 ms"]),
        "waiting": (
            waiting.as_text({**CONDITIONS, "switch_interval": 0.005}, FOUND),
            ["1.250 [1.125, 1.375]", "2.000 [2.000, 2.000]", "200 us"],
        ),
        "kernels": (
            kernels.as_text({**CONDITIONS, "usable": 2.0, "caches": "cold"}, [ADDED]),
            ["2 cores a rank", "0.50 [0.50, 0.62]"],
        ),
        "zero": (zero.as_text(CONDITIONS, RESULT), ["4.297 KiB", "1.100", "3.906 KiB", "2 ms [50%]", "[0.500, 0.750]"]),
    }


@pytest.mark.parametrize("name", ["rpc", "autograd", "recovery", "waiting", "kernels", "zero"])
def test_reports_show_what_was_measured(name: str) -> None:
    text, words = texts()[name]
    assert not [word for word in words if word not in re.sub(" +", " ", text)]


def test_pictures_show_every_contestant() -> None:
    trips, rates, ratios, idle = rpc.panels(CALLS)
    assert set(trips.series) == {rpc.OURS, rpc.TENSORPIPE, rpc.MPI}
    assert rates.heights[rpc.OURS] == pytest.approx([1e4])
    assert list(ratios.series) == ["hvlike/TensorPipe", "hvlike/MPI"]
    assert idle.heights[rpc.TENSORPIPE] == [100.0, 99.0]
    times, ratios, parts = autograd.panels(STEPS, ANALYSES)
    assert set(times.series) == set(STEPS[0].samples)
    assert set(ratios.series) == {"safe/TensorPipe", "smart/TensorPipe", "smart/safe"}
    assert parts.series == {"scan": pytest.approx([10.0]), "order": pytest.approx([5.0])}
    way = scaling.summarise([COORDINATOR, MEMBER], steps=4)
    silent = scaling.summarise([scaling.RankCounts(Sent(), [1.0])] * 2, steps=1)
    messages, times = scaling.panels([scaling.Result(2, 1, {"planned": silent, "negotiated": way})])
    assert list(messages.series) == [
        *("planned, mean: none", "planned, coordinator: none", "negotiated, mean", "negotiated, coordinator")
    ]
    assert set(times.series) == {"planned", "negotiated"}
    assert [panel.title for panel in recovery.panels(recovered())] == ["shrink", "spare"]
    (panel,) = waiting.panels(FOUND)
    assert panel.heights == {waiting.AGAIN: [1.0], waiting.NAMED: [1.25], waiting.PLANNED: [2.0]}
    (panel,) = kernels.panels([ADDED])
    assert set(panel.series) == set(ADDED.seconds)
    assert all(set(panel.series) == set(RESULT.seconds) for panel in zero.panels(RESULT))


def test_machines_get_samples_and_ratios() -> None:
    found = CALLS[0].as_json()
    assert found["work"] == "empty call"
    assert found["found"][rpc.OURS][0]["samples"] == [1e-4, 3e-4, 2e-4]
    assert found["ratios"]["hvlike/TensorPipe"]["of_medians"] == pytest.approx(0.5)
    assert CALLS[2].as_json()["found"][rpc.TENSORPIPE][1]["median"] == 0.99
    assert STEPS[0].as_json()["ratios"]["safe/TensorPipe"]["of_medians"] == pytest.approx(0.5)
    assert recovered()[0].as_json()["total"]["worst"] == pytest.approx(0.4)
    assert waiting.as_json(FOUND)[waiting.FREE]["slowdown"]["matmul"][waiting.NAMED]["samples"] == [1.5, 1.0]
    assert {name: ratio.of_medians for name, ratio in ADDED.ratios.items()} == {"hvlike, 2 / hvlike, 1": 0.5}
    assert RESULT.as_json()["ratios"][f"{zero.ALONE}/{zero.ADAM}"]["paired"]["median"] == pytest.approx(1 / 3)

"""bench autograd: the same step for every contestant, right gradients, tables and pictures of all of it."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bench.some_conditions import CONDITIONS
from torch import Tensor

from benchmarks.autograd import (
    ALONE,
    NODES,
    SAFE,
    SMART,
    TENSORPIPE,
    Analysis,
    Result,
    analyse,
    as_text,
    panels,
)
from benchmarks.rpc_session import Step, half, steps_alone
from hvlike.errors import HvlikeError

STEP = Step(4, 3, 1)
RESULTS = [
    Result(STEP, {SAFE: [1e-4, 3e-4, 2e-4], SMART: [2e-4] * 3, TENSORPIPE: [4e-4, 6e-4, 4e-4], ALONE: [2e-5] * 3}),
    Result(Step(4, 3, 1, unused=10), {SAFE: [4e-4] * 3, SMART: [1e-4] * 3}),
]
ANALYSES = [Analysis(100, 1e-3, 1e-4, 5e-5)]


class Local:
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


def modules(local: Local) -> tuple[Any, Any]:
    names = {name: getattr(local, name) for name in ("context", "backward", "get_gradients", "__name__")}
    return SimpleNamespace(rpc_sync=local.rpc_sync), SimpleNamespace(**names)


@pytest.mark.parametrize("unused", [0, 2])
def test_a_step_is_forward_backward_and_gradients(unused: int) -> None:
    local = Local()
    step = Step(4, 3, 1, unused)
    samples = step.measure(*modules(local))
    assert 5 <= len(samples) <= 100
    assert all(each > 0 for each in samples)
    assert local.calls == (1 + unused) * local.backwards
    # One that is checked, three that are not timed.
    assert local.backwards == len(samples) + 4


def test_wrong_gradients_are_no_result() -> None:
    with pytest.raises(HvlikeError, match=r"local: wrong gradients of 1\+1 layers of 4, batch 3"):
        STEP.measure(*modules(Local(factor=1.1)))


def test_the_same_step_runs_in_one_process() -> None:
    assert all(each > 0 for each in steps_alone(STEP))


def test_the_analysis_is_of_graphs_of_the_size_asked_for() -> None:
    found = analyse(NODES[0])
    # Not more than the sum and the leaf's own node beside the chain.
    assert abs(found.nodes - NODES[0]) <= 1
    assert min(found.backward, found.scan, found.order) > 0


def test_reports_show_every_contestant() -> None:
    text = as_text({**CONDITIONS, "left_out": ["Without gloo: it has no graphs."]}, RESULTS, ANALYSES)
    assert "200 us" in text
    assert "0.50 [0.38, 0.50]" in text
    assert "10 unused results" in text
    assert "100 us (10%)" in text
    assert "Without gloo" in text
    found = RESULTS[0].as_json()
    assert found["found"][SAFE]["samples"] == [1e-4, 3e-4, 2e-4]
    assert found["ratios"]["safe/TensorPipe"]["of_medians"] == pytest.approx(0.5)


def test_pictures_show_every_contestant() -> None:
    times, ratios, parts = panels(RESULTS, ANALYSES)
    assert set(times.series) == {SAFE, SMART, TENSORPIPE, ALONE}
    assert set(ratios.series) == {"safe/TensorPipe", "smart/TensorPipe", "smart/safe"}
    assert parts.series == {"scan": pytest.approx([10.0]), "order": pytest.approx([5.0])}

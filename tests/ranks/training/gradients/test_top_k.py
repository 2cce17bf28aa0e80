"""Top-k sends the largest elements of every rank, and nothing is lost: what is not sent is remembered exactly."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Run, mean
from support.training.problem import same_on_all_ranks

from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.compression import TopK
from hvlike.errors import UsageError


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("options", [{"k": 5}, {"ratio": 0.1}, {"k": 3, "use_error_feedback": False}])
def test_the_largest_of_every_rank_are_added(hvd: ModuleType, op: str, options: dict[str, Any]) -> None:
    compression = TopK(**options)
    run = Run(hvd, compression, [(6, 8), (50,), (2,)], op=getattr(hvd, op))
    errors = [[torch.zeros(shape) for shape in run.shapes] for _ in range(hvd.size())]
    for step in range(4):
        reduced = run.step(step)
        assert same_on_all_ranks(reduced)
        everybody = run.everybody(step)
        for index, gradient in enumerate(reduced):
            sent = []
            for rank, each in enumerate(everybody):
                work = (each[index] + errors[rank][index]).reshape(-1)
                chosen = torch.zeros_like(work)
                places = work.abs().argsort(descending=True)[: compression.chosen(len(work))]
                chosen[places] = work[places]
                sent.append(chosen.view(gradient.shape))
                if compression.use_error_feedback:
                    errors[rank][index] = (work - chosen).view(gradient.shape)
            expected = mean(sent) * (hvd.size() if op == "Sum" else 1)
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)
            remembered = run.errors().get(f"p{index}")
            if remembered is not None:
                assert torch.equal(remembered.view(gradient.shape), errors[hvd.rank()][index])


@pytest.mark.mpi(min_size=2)
def test_what_is_sent_and_what_is_remembered_is_the_gradient(hvd: ModuleType) -> None:
    run = Run(hvd, TopK(ratio=0.05), [(20, 20)])
    before = torch.zeros(400, dtype=torch.float64)
    for step in range(6):
        (reduced,) = run.step(step)
        after = mean(list(allgather(run.errors()["p0"].unsqueeze(0))))
        arrived = mean([each[0] for each in run.everybody(step)]).view(-1)
        torch.testing.assert_close(reduced.view(-1).double() + after, arrived + before, rtol=0, atol=1e-6)
        before = after


@pytest.mark.parametrize("options", [{"k": 1000}, {"ratio": 1.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_elements_are_an_exact_allreduce(hvd: ModuleType, options: dict[str, Any], dtype: torch.dtype) -> None:
    plain = Run(hvd, hvd.Compression.none, [(6, 8), (3,)], dtype)
    run = Run(hvd, TopK(**options), [(6, 8), (3,)], dtype)
    for step in range(2):
        for one, other in zip(plain.step(step), run.step(step), strict=True):
            assert torch.equal(one, other)
    assert run.errors() == {}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(hvd: ModuleType, dtype: torch.dtype) -> None:
    run = Run(hvd, TopK(k=1), [(3, 3), (4,)], dtype)
    gradients = [torch.zeros(3, 3, dtype=dtype), torch.zeros(4, dtype=dtype)]
    gradients[0][hvd.rank() % 3, 0] = 2.0
    gradients[1][1] = 40000.0 if dtype is torch.float16 else 3.0
    reduced = run.step_with(gradients)
    assert same_on_all_ranks(reduced)
    assert all(each.dtype is dtype for each in reduced)
    expected = [len(range(row, hvd.size(), 3)) * 2.0 / hvd.size() for row in range(3)]
    torch.testing.assert_close(reduced[0][:, 0].double(), torch.tensor(expected).double(), rtol=1e-2, atol=0)
    # The sum of the ranks would not fit into float16; the mean does.
    torch.testing.assert_close(reduced[1], gradients[1], rtol=1e-2, atol=0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_is_not_remembered(hvd: ModuleType, bad: float) -> None:
    run = Run(hvd, TopK(k=2), [(5, 5), (5,)])
    run.step(0)
    before = run.errors()
    gradients = [torch.ones(5, 5), torch.ones(5)]
    if hvd.rank() == 0:
        gradients[0][3, 4] = bad
    reduced = run.step_with(gradients)
    assert not bool(torch.isfinite(reduced[0]).all())
    assert torch.equal(run.errors()["p0"], before["p0"])
    assert not torch.equal(run.errors()["p1"], before["p1"])
    assert all(bool(torch.isfinite(each).all()) for each in run.step(1))


def test_convergence_on_a_regression(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    target = torch.randn(16)
    parameter = torch.nn.Parameter(torch.zeros(16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.05), compression=TopK(k=2))
    for _ in range(250):
        optimizer.zero_grad()
        (parameter - target * (1 + hvd.rank() - (hvd.size() - 1) / 2)).square().sum().div(2).backward()
        optimizer.step()
    assert float((parameter.detach() - target).abs().max()) < 0.2
    assert same_on_all_ranks([parameter])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either ratio or k, got ratio=None and k=None"),
        ({"ratio": 0.5, "k": 3}, "either ratio or k"),
        ({"ratio": 0.0}, "ratio must be > 0 and <= 1, got 0.0"),
        ({"ratio": float("nan")}, "ratio must be > 0 and <= 1, got nan"),
        ({"k": 0}, "k must be a whole number >= 1, got 0"),
        ({"k": 2.0}, "k must be a whole number >= 1, got 2.0"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TopK(**arguments)

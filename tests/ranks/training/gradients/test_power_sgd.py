"""PowerSGD equals the algorithm of its paper, computed in one process on the gradients of all ranks."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Run, mean
from support.training.problem import same_on_all_ranks
from torch import Tensor

from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.compression import PowerSGD
from hvlike.collectives.compression.power_sgd import random_matrix

SHAPES = [(24, 16), (7,), (10, 3, 4), (2, 2), ()]
COMPRESSED = (0, 2)


class Reference:
    """Algorithms 1 and 2 of the paper for one matrix, in float64, with the Q that hvlike starts from."""

    def __init__(self, name: str, shape: tuple[int, int], ranks: int, options: PowerSGD) -> None:
        self.name, self.options = name, options
        self.columns = min(*shape, options.matrix_approximation_rank)
        self.errors = [torch.zeros(shape, dtype=torch.float64) for _ in range(ranks)]
        self.q: Tensor | None = None

    def step(self, iteration: int, gradients: list[Tensor]) -> Tensor:
        matrices = [gradient.double() for gradient in gradients]
        if self.options.use_error_feedback:
            matrices = [matrix + error for matrix, error in zip(matrices, self.errors, strict=True)]
        if self.q is None or not self.options.warm_start:
            shape = (matrices[0].shape[1], self.columns)
            self.q = random_matrix(shape, torch.float32, self.options.random_seed, iteration, self.name).double()
        basis = torch.linalg.qr(self.q).Q
        p = torch.linalg.qr(mean([matrix @ basis for matrix in matrices])).Q
        own = [matrix.t() @ p for matrix in matrices]
        self.errors = [matrix - p @ each.t() for matrix, each in zip(matrices, own, strict=True)]
        self.q = mean(own)
        return p @ self.q.t()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warm_start": False, "random_seed": 7},
        {"use_error_feedback": False},
        {"matrix_approximation_rank": 3},
    ],
    ids=["usual", "cold", "forgetful", "rank 3"],
)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_equals_the_paper(hvd: ModuleType, options: dict[str, Any], op: str) -> None:
    compression = PowerSGD(start_powerSGD_iter=0, min_compression_rate=1.5, **options)
    run = Run(hvd, compression, SHAPES, op=getattr(hvd, op))
    factor = hvd.size() if op == "Sum" else 1
    references = {
        index: Reference(f"p{index}", (SHAPES[index][0], 16 if index == 0 else 12), hvd.size(), compression)
        for index in COMPRESSED
    }
    for step in range(4):
        reduced = run.step(step)
        assert same_on_all_ranks(reduced)
        everybody = run.everybody(step)
        for index, gradient in enumerate(reduced):
            inputs = [each[index] for each in everybody]
            if index in references:
                reference = references[index]
                matrices = [each.reshape(each.shape[0], -1) for each in inputs]
                expected = reference.step(step, matrices).view(gradient.shape)
                if compression.use_error_feedback:
                    error = run.errors()[f"p{index}"].double()
                    torch.testing.assert_close(error, reference.errors[hvd.rank()], rtol=1e-3, atol=1e-4)
            else:
                expected = mean(inputs)
            torch.testing.assert_close(gradient.double(), factor * expected, rtol=1e-3, atol=2e-4)


@pytest.mark.mpi(min_size=2)
def test_what_is_sent_and_what_is_remembered_is_the_gradient(hvd: ModuleType) -> None:
    run = Run(hvd, PowerSGD(start_powerSGD_iter=0), [(30, 40)])
    before = torch.zeros(30, 40, dtype=torch.float64)
    for step in range(6):
        (reduced,) = run.step(step)
        remembered = run.errors()["p0"]
        after = mean(list(allgather(remembered.unsqueeze(0))))
        arrived = mean([each[0] for each in run.everybody(step)])
        torch.testing.assert_close(reduced.double() + after, arrived + before, rtol=0, atol=1e-5)
        before = after


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6)])
def test_full_rank_is_exact_up_to_rounding(hvd: ModuleType, shape: tuple[int, int]) -> None:
    run = Run(hvd, PowerSGD(6, start_powerSGD_iter=0, min_compression_rate=1e-3), [shape])
    for step in range(3):
        (reduced,) = run.step(step)
        expected = mean([each[0] for each in run.everybody(step)])
        torch.testing.assert_close(reduced.double(), expected, rtol=0, atol=1e-5)
    # A mean of less rank than it has columns to send is exact too.
    gradient = torch.outer(torch.arange(float(shape[0])), torch.ones(shape[1]))
    for _ in range(2):
        (reduced,) = run.step_with([gradient])
        torch.testing.assert_close(reduced, gradient, rtol=0, atol=1e-4)


@pytest.mark.mpi(min_size=2)
def test_compression_begins_after_the_first_steps(hvd: ModuleType) -> None:
    run = Run(hvd, PowerSGD(start_powerSGD_iter=2), [(20, 30)])
    for step in range(4):
        (reduced,) = run.step(step)
        expected = mean([each[0] for each in run.everybody(step)])
        close = torch.allclose(reduced.double(), expected, rtol=0, atol=1e-5)
        assert close == (step < 2)
        assert bool(run.errors()) == (step >= 2)
    rate, before, after = run.compression.compression_stats()
    assert before == 4 * 600 * 4
    assert after == 2 * 600 * 4 + 2 * 50 * 4
    assert rate == before / after


@pytest.mark.mpi(min_size=2)
def test_small_tensors_are_left_alone(hvd: ModuleType) -> None:
    # (8, 8): 64 elements against 16, a rate of 4.
    for rate, compressed in ((3.9, True), (4.0, False)):
        run = Run(hvd, PowerSGD(start_powerSGD_iter=0, min_compression_rate=rate), [(8, 8)])
        (reduced,) = run.step(0)
        expected = mean([each[0] for each in run.everybody(0)])
        assert torch.allclose(reduced.double(), expected, rtol=0, atol=1e-6) != compressed


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(hvd: ModuleType, dtype: torch.dtype) -> None:
    run = Run(hvd, PowerSGD(4, start_powerSGD_iter=0, min_compression_rate=1e-3), [(4, 6), (3,)], dtype)
    for step in range(2):
        reduced = run.step(step)
        assert same_on_all_ranks(reduced)
        for index, gradient in enumerate(reduced):
            assert gradient.dtype is dtype
            expected = mean([each[index] for each in run.everybody(step)])
            torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)
    assert run.errors()["p0"].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
def test_gradients_of_zero_do_not_end_the_transmission(hvd: ModuleType, epsilon: float) -> None:
    run = Run(hvd, PowerSGD(start_powerSGD_iter=0, orthogonalization_epsilon=epsilon), [(20, 30)])
    assert not bool(run.step_with([torch.zeros(20, 30)])[0].any())
    gradient = torch.outer(torch.ones(20), torch.arange(30.0))
    (reduced,) = run.step_with([gradient])
    torch.testing.assert_close(reduced, gradient, rtol=0, atol=1e-3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_on_one_rank_is_seen_by_all_and_not_remembered(hvd: ModuleType, bad: float) -> None:
    run = Run(hvd, PowerSGD(start_powerSGD_iter=0), [(20, 30), (20, 20)])
    run.step(0)
    before = run.errors()
    gradients = [torch.ones(20, 30), torch.ones(20, 20)]
    if hvd.rank() == hvd.size() - 1:
        gradients[0][3, 4] = bad
    reduced = run.step_with(gradients)
    assert not bool(torch.isfinite(reduced[0]).any())
    assert bool(torch.isfinite(reduced[1]).all())
    after = run.errors()
    assert torch.equal(before["p0"], after["p0"])
    assert not torch.equal(before["p1"], after["p1"])
    assert all(bool(torch.isfinite(each).all()) for each in run.step(1))


@pytest.mark.mpi(min_size=2)
def test_predivision_changes_rounding_only(hvd: ModuleType) -> None:
    plain = Run(hvd, PowerSGD(start_powerSGD_iter=0), [(12, 18)])
    divided = Run(hvd, PowerSGD(start_powerSGD_iter=0), [(12, 18)], gradient_predivide_factor=4.0)
    for step in range(3):
        torch.testing.assert_close(plain.step(step), divided.step(step), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plain.errors(), divided.errors(), rtol=1e-4, atol=1e-4)


@pytest.mark.mpi(min_size=2)
def test_other_strides(hvd: ModuleType) -> None:
    rows = Run(hvd, PowerSGD(start_powerSGD_iter=0), [(8, 6, 3, 3)])
    last = Run(hvd, PowerSGD(start_powerSGD_iter=0), [(8, 6, 3, 3)])
    last.parameters[0].data = last.parameters[0].data.to(memory_format=torch.channels_last)
    for step in range(2):
        torch.testing.assert_close(rows.step(step), last.step(step), rtol=1e-4, atol=1e-5)


def test_convergence_on_a_regression(hvd: ModuleType) -> None:
    """Rank 1 of 8 would never reach the optimum without the memory of what it has not sent."""
    torch.manual_seed(0)
    target = torch.randn(8, 8)
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.05), compression=PowerSGD(start_powerSGD_iter=0)
    )
    offset = hvd.rank() - (hvd.size() - 1) / 2
    for _ in range(250):
        optimizer.zero_grad()
        # Every rank pulls elsewhere; the mean of the ranks pulls to the target.
        (parameter - target - offset).square().sum().div(2).backward()
        optimizer.step()
    assert float((parameter.detach() - target).abs().max()) < 1e-2
    assert same_on_all_ranks([parameter])

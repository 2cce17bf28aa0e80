"""SyncBatchNorm on n ranks equals torch.nn.BatchNorm in one process with the whole batch."""

import itertools
from types import ModuleType

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.differs_by_ranks(2)

FEATURES = 5
SHAPES = {2: (), 3: (7,), 4: (3, 4), 5: (2, 3, 2)}
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}


def sizes_of(kind: str, ranks: int) -> list[int]:
    """How many rows each rank has."""
    if kind == "even":
        return [4] * ranks
    if kind == "uneven":
        return [2 + 3 * rank for rank in range(ranks)]
    # All but the last rank have none.
    return [0] * (ranks - 1) + [6]


def whole_batch(rows: int, dimensions: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs far from 0, and what the loss weighs outputs with."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, FEATURES, *SHAPES[dimensions])
    inputs = 3 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def my_part(batch: Tensor, sizes: list[int], rank: int) -> Tensor:
    """The rows of this rank."""
    return batch.split(sizes)[rank].clone()


def make_pair(hvd: ModuleType, dimensions: int, dtype: torch.dtype, **options: object) -> tuple[nn.Module, nn.Module]:
    """The layer of one process, and ours with the same parameters."""
    # 16-bit inputs go with parameters of float32, as in mixed precision.
    precision = torch.float64 if dtype is torch.float64 else torch.float32
    reference = LAYERS[dimensions](FEATURES, dtype=precision, **options)
    if reference.affine:
        with torch.no_grad():
            reference.weight.copy_(torch.linspace(0.5, 2, FEATURES))
            reference.bias.copy_(torch.linspace(-1, 1, FEATURES))
    layer = hvd.SyncBatchNorm(FEATURES, dtype=precision, **options)
    layer.load_state_dict(reference.state_dict())
    return reference, layer


def check_steps(
    hvd: ModuleType, pair: tuple[nn.Module, nn.Module], dimensions: int, dtype: torch.dtype, sizes: list[int]
) -> None:
    """Compare outputs, gradients and buffers of two training steps and of an evaluation."""
    reference, layer = pair
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for step in range(2):
        inputs, weights = whole_batch(sum(sizes), dimensions, dtype, seed=step)
        inputs.requires_grad_()
        expected = reference(inputs)
        (expected * weights).sum().backward()
        mine = my_part(inputs.detach(), sizes, hvd.rank()).requires_grad_()
        output = layer(mine)
        assert output.dtype is dtype
        (output * my_part(weights, sizes, hvd.rank())).sum().backward()
        torch.testing.assert_close(output, my_part(expected, sizes, hvd.rank()), **tolerance)
        torch.testing.assert_close(mine.grad, my_part(inputs.grad, sizes, hvd.rank()), **tolerance)
    for own, whole in zip(layer.parameters(), reference.parameters(), strict=True):
        total = hvd.allreduce(own.grad, op=hvd.Sum)
        torch.testing.assert_close(total, whole.grad, rtol=tolerance["rtol"], atol=20 * tolerance["atol"])
    for own, whole in zip(layer.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(own, whole, rtol=1e-3 if dtype.itemsize < 4 else tolerance["rtol"], atol=1e-6)
    assert same_on_all_ranks(list(layer.buffers()) or [torch.zeros(1)])
    reference.eval()
    layer.eval()
    if layer.running_mean is not None:
        torch.testing.assert_close(layer(mine), reference(mine), **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dimensions", SHAPES)
@pytest.mark.parametrize("kind", ["even", "uneven", "mostly empty"])
def test_dimensions_dtypes_and_batch_sizes(hvd: ModuleType, kind: str, dimensions: int, dtype: torch.dtype) -> None:
    sizes = sizes_of(kind, hvd.size())
    check_steps(hvd, make_pair(hvd, dimensions, dtype), dimensions, dtype, sizes)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_options(hvd: ModuleType, momentum: float | None, affine: bool, track: bool) -> None:
    pair = make_pair(hvd, 4, torch.float32, momentum=momentum, affine=affine, track_running_stats=track, eps=0.01)
    check_steps(hvd, pair, 4, torch.float32, sizes_of("uneven", hvd.size()))


def test_channels_last_stays_channels_last(hvd: ModuleType) -> None:
    _, layer = make_pair(hvd, 4, torch.float32)
    inputs = torch.randn(2 + hvd.rank(), FEATURES, 3, 4).to(memory_format=torch.channels_last).requires_grad_()
    output = layer(inputs)
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.square().sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mean_far_from_zero_does_not_spoil_the_variance(hvd: ModuleType, dtype: torch.dtype) -> None:
    center = 1e4 if dtype is torch.float32 else 1e9
    values = (torch.arange(8 * hvd.size(), dtype=torch.float64) % 7 - 3).reshape(-1, 1)
    layer = hvd.SyncBatchNorm(1, momentum=1.0, eps=0.0, affine=False, dtype=dtype)
    output = layer((values + center)[hvd.rank() :: hvd.size()].to(dtype))
    expected = (values - values.mean()) / values.var(correction=0).sqrt()
    torch.testing.assert_close(output.double(), expected[hvd.rank() :: hvd.size()], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var.double(), values.var(0), rtol=1e-6, atol=0)


def test_an_empty_batch_on_all_ranks_changes_nothing(hvd: ModuleType) -> None:
    layer = hvd.SyncBatchNorm(FEATURES)
    inputs = torch.zeros(0, FEATURES, 2, requires_grad=True)
    output = layer(inputs)
    assert output.shape == (0, FEATURES, 2)
    output.sum().backward()
    assert layer.running_mean.tolist() == [0.0] * FEATURES
    assert layer.running_var.tolist() == [1.0] * FEATURES
    assert layer.num_batches_tracked == 1


def test_numeric_derivative_across_ranks(hvd: ModuleType) -> None:
    torch.manual_seed(hvd.rank())
    layer = hvd.SyncBatchNorm(2, dtype=torch.float64)
    layer.weight.data = torch.tensor([0.5, 2.0], dtype=torch.float64)
    inputs = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def loss_of_all(values: Tensor) -> Tensor:
        own = (layer(values) * torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(3, 2) ** 2).tanh().sum()
        return hvd.allreduce(own, op=hvd.Sum)

    # Backward of the sum is an allreduce itself: each rank's 1 / size adds up to 1.
    (loss_of_all(inputs) / hvd.size()).backward()
    step = 1e-6
    for rank, row, channel in itertools.product(range(hvd.size()), range(3), range(2)):
        move = torch.zeros_like(inputs)
        if rank == hvd.rank():
            move[row, channel] = step
        with torch.no_grad():
            slope = (loss_of_all(inputs + move) - loss_of_all(inputs - move)) / (2 * step)
        if rank == hvd.rank():
            assert abs(float(slope - inputs.grad[row, channel])) < 1e-7

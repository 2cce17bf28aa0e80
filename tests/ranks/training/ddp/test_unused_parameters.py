"""Parameters that a rank, or all ranks, have not used: zeros, untouched, or an error that names them."""

from types import ModuleType

import pytest
import torch
from support.training.ddp_models import Branches, gradients, inputs
from support.training.problem import same_on_all_ranks
from torch import Tensor

from hvlike.errors import DataParallelError
from hvlike.nn import DistributedDataParallel

pytestmark = pytest.mark.differs_by_overlap


def run(ddp: DistributedDataParallel, used: str) -> None:
    ddp(inputs(), used).square().mean().backward()


def biases(module: Branches) -> dict[str, Tensor | None]:
    return {name: layer.bias.grad for name, layer in module.layers.items()}


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=["find", "static"])
def test_what_one_rank_uses_is_the_average_with_zeros(hvd: ModuleType, options: dict[str, bool]) -> None:
    module, alone = Branches(), Branches()
    ddp = DistributedDataParallel(module, **options)
    alone(inputs(), "ab").square().mean().backward()
    expected = alone.layers["b"].bias.grad
    for step in range(3):
        ddp.zero_grad()
        run(ddp, "ab" if hvd.rank() == 0 else "a")
        grads = biases(module)
        assert grads["c"] is None
        assert expected is not None
        torch.testing.assert_close(grads["b"], expected / hvd.size())
        kept = torch.full((4,), float(step))
        module.layers["c"].bias.grad = kept
        ddp.zero_grad(set_to_none=False)
        module.layers["c"].bias.grad = kept + hvd.rank()
        run(ddp, "ab" if hvd.rank() == 0 else "a")
        assert torch.equal(module.layers["c"].bias.grad, kept + hvd.rank())


def test_used_parameters_may_change(hvd: ModuleType) -> None:
    module = Branches()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    for used in ("a", "abc", "c", "b", "ca"):
        ddp.zero_grad()
        run(ddp, used)
        assert {name for name, grad in biases(module).items() if grad is not None} == set(used)


def test_local_sums_count_as_used(hvd: ModuleType) -> None:
    module, alone = Branches(), Branches()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    with ddp.no_sync():
        run(ddp, "ab")
    run(ddp, "a")
    alone(inputs(), "ab").square().mean().backward()
    torch.testing.assert_close(biases(module)["b"], biases(alone)["b"])
    assert biases(module)["c"] is None


def test_left_out_without_being_told(hvd: ModuleType) -> None:
    module = Branches()
    ddp = DistributedDataParallel(module)
    for _ in range(2):
        ddp.zero_grad()
        run(ddp, "ab")
        if hvd.size() > 1:
            assert module.layers["c"].bias.grad is None
        with pytest.raises(RuntimeError, match=r"finished reduction in the prior iteration before starting") as info:
            run(ddp, "abc")
        assert isinstance(info.value, DataParallelError)
        text = str(info.value)
        assert f"on rank {hvd.rank()}: 'layers.c.weight', 'layers.c.bias'." in text
        assert "find_unused_parameters=True" in text
        assert "all outputs of forward" in text
        # That was all: training can go on.
        run(ddp, "abc")
        run(ddp, "abc")


@pytest.mark.mpi(min_size=2)
def test_left_out_by_one_rank(hvd: ModuleType) -> None:
    """The others are not left waiting, and only that rank complains."""
    module = Branches()
    ddp = DistributedDataParallel(module)
    run(ddp, "ab" if hvd.rank() == 1 else "abc")
    if hvd.rank() == 1:
        with pytest.raises(DataParallelError, match=r"'layers\.c\.weight'"):
            ddp(inputs(), "abc")
    run(ddp, "abc")


@pytest.mark.parametrize("drops", [False, True])
def test_a_backward_pass_that_failed(hvd: ModuleType, drops: bool) -> None:
    """One rank fails in the middle of a pass, and may drop its gradients: the others get its zeros once it goes on."""
    module = Branches()
    ddp = DistributedDataParallel(module)
    run(ddp, "abc")
    result = ddp(inputs(), "abc")
    if hvd.rank() == 0:
        module.layers["a"].weight.register_hook(fail := Failing())
        with pytest.raises(ZeroDivisionError):
            result.square().mean().backward()
        fail.active = False
        if drops:
            ddp.zero_grad()
        with pytest.raises(DataParallelError, match=r"interrupted by an error.*'layers\.a\.weight'"):
            ddp(inputs(), "abc")
    else:
        result.square().mean().backward()
    ddp.zero_grad()
    run(ddp, "abc")
    alone = Branches()
    alone(inputs(), "abc").square().mean().backward()
    torch.testing.assert_close(biases(module)["a"], biases(alone)["a"])


@pytest.mark.parametrize("used", ["", "a", "ac", "c"])
def test_a_pass_that_fails_before_it_reaches_one_of_the_parameters_that_a_rank_uses(hvd: ModuleType, used: str) -> None:
    """Whichever these are, that rank knows that the others have waited for it."""
    module = Branches()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    result = ddp(inputs().requires_grad_() * 1.0, used if hvd.rank() == 0 else "abc")
    if hvd.rank() == 0:
        result.register_hook(Failing())
        with pytest.raises(ZeroDivisionError):
            result.sum().backward()
        with pytest.raises(DataParallelError, match="interrupted by an error"):
            ddp(inputs(), "abc")
    else:
        result.sum().backward()
    ddp.zero_grad()
    run(ddp, "abc")
    assert same_on_all_ranks(gradients(module))


class Failing:
    """A hook of a tensor that fails as long as it is active."""

    active = True

    def __call__(self, gradient: Tensor) -> None:
        if self.active:
            raise ZeroDivisionError

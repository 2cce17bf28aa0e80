"""What fails on one rank in the middle of a call is an error on all of them, and nothing hangs."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import same_on_all_ranks
from torch import nn
from torch.optim import SGD

from hvlike.errors import CheckpointError, HorovodInternalError, HvlikeError, UsageError
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel, allreduce_hook
from hvlike.optim import ZeroRedundancyOptimizer, hook_with_zero_step

pytestmark = pytest.mark.mpi(min_size=2)


def works(hvd: ModuleType) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after") == hvd.size()


def made(momentum: float = 0.9) -> tuple[nn.Parameter, SGD]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.1, momentum=momentum)
    parameter.grad = torch.ones(2)
    optimizer.step()
    return parameter, optimizer


def an_option(optimizer: SGD) -> None:
    optimizer.param_groups[0]["decay_of"] = lambda step: step


def a_state(optimizer: SGD) -> None:
    next(iter(optimizer.state.values()))["lock"] = threading.Lock()


def no_state(optimizer: SGD) -> None:
    del optimizer.state


@pytest.mark.parametrize("spoil", [an_option, a_state, no_state])
def test_broadcast_optimizer_state(hvd: ModuleType, spoil: Callable[[SGD], None]) -> None:
    _, optimizer = made()
    if hvd.rank() == 0:
        spoil(optimizer)
    before = None if hvd.rank() == 0 else [dict(each) for each in optimizer.state.values()]
    expected = UsageError if hvd.rank() == 0 else HorovodInternalError
    with pytest.raises(expected, match="broadcast_optimizer_state: rank 0: "):
        hvd.broadcast_optimizer_state(optimizer, 0)
    if hvd.rank():
        assert [dict(each) for each in optimizer.state.values()] == before
    works(hvd)
    _, other = made()
    hvd.broadcast_optimizer_state(other, 0)


def test_broadcast_parameters_into_what_cannot_be_written(hvd: ModuleType) -> None:
    tensor = torch.ones(1).expand(3) if hvd.rank() == 1 else torch.full((3,), 2.0)
    good = torch.full((2,), float(hvd.rank()))
    with pytest.raises(UsageError if hvd.rank() == 1 else HorovodInternalError, match="'late'"):
        hvd.broadcast_parameters({"early": good, "late": tensor}, 0)
    # Nothing was sent.
    assert torch.equal(good, torch.full((2,), float(hvd.rank())))
    works(hvd)


def test_the_end_of_a_join_context(hvd: ModuleType) -> None:
    parameter, plain = made()
    if hvd.rank() == hvd.size() - 1:
        an_option(plain)
    optimizer = hvd.DistributedOptimizer(plain, [("p", parameter)])

    def train() -> None:
        with Join([optimizer]):
            for _ in range(1 + hvd.rank()):
                optimizer.zero_grad()
                parameter.sum().backward()
                optimizer.step()

    with pytest.raises((UsageError, HorovodInternalError), match="lambda"):
        train()
    works(hvd)


def zero(**options: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    return model, ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9, **options)


def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("to", [0, 1])
def test_consolidate_state_dict(hvd: ModuleType, to: int) -> None:
    model, optimizer = zero(reduce_gradients=True)
    step(model, optimizer)
    if hvd.rank() == 0:
        next(iter(optimizer.state.values()))["function"] = lambda: None
    with pytest.raises(RuntimeError, match="Rank 0"):
        optimizer.consolidate_state_dict(to)
    works(hvd)
    step(model, optimizer)


@pytest.mark.parametrize("reduces", [True, False])
def test_options_that_do_not_travel_to_absent_ranks(hvd: ModuleType, reduces: bool) -> None:
    model, optimizer = zero(reduce_gradients=reduces)
    optimizer.param_groups[0]["decay_of"] = lambda step: step

    def train() -> None:
        with Join([optimizer]):
            for _ in range(1 + hvd.rank()):
                step(model, optimizer)

    with pytest.raises(HvlikeError, match=r"do not pickle|cannot be pickled"):
        train()
    works(hvd)


class Failing(SGD):
    """Fails where it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails:
            raise ValueError("no step")
        return super().step(closure)


@pytest.mark.parametrize("way", ["reduces", "plain", "overlap"])
def test_a_step_that_fails_on_one_rank(hvd: ModuleType, way: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Failing, reduce_gradients=way == "reduces", overlap_with_ddp=way == "overlap", lr=0.1
    )
    if way == "overlap":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer, warm_up=0))

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if way != "overlap":
            optimizer.step()

    train()
    Failing.fails = hvd.rank() == 1
    try:
        with pytest.raises(ValueError if hvd.rank() == 1 else HorovodInternalError, match="no step") as info:
            train()
        if hvd.rank() != 1:
            assert "rank 1 could not update its share" in str(info.value)
        assert same_on_all_ranks(model.parameters())
    finally:
        Failing.fails = False
    train()
    assert same_on_all_ranks(model.parameters())


def test_a_step_that_fails_while_a_rank_is_absent(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Failing, reduce_gradients=True, lr=0.1)
    last = hvd.size() - 1

    def train() -> None:
        with Join([optimizer]):
            for number in range(4 if hvd.rank() else 1):
                Failing.fails = hvd.rank() == last and number == 3
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()

    try:
        # Of two active ranks the other one hears of it in its own step.
        with pytest.raises(ValueError if hvd.rank() == last else HorovodInternalError, match="no step"):
            train()
    finally:
        Failing.fails = False
    works(hvd)


class Part:
    """A part of an elastic state that fails on one rank."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        return self._answer("state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._answer("load_state_dict")

    def _answer(self, what: str) -> dict[str, int]:
        if self.fails == what:
            raise KeyError(what)
        return {"a": 1}


class LocalPart(Part):
    def local_state_dict(self) -> dict[str, int]:
        return self._answer("local_state_dict")

    def load_local_state_dicts(self, states: Any, ranks_before: int) -> None:
        self._answer("load_local_state_dicts")


def check_names(hvd: ModuleType, error: BaseException) -> None:
    if hvd.rank() != 1:
        assert "rank 1: KeyError" in str(error)


@pytest.mark.parametrize("what", ["state_dict", "load_state_dict"])
def test_sync_of_an_elastic_state(hvd: ModuleType, what: str) -> None:
    state = hvd.elastic.TorchState(part=Part(""), epoch=0)
    state.part.fails = what if hvd.rank() == 1 else ""
    with pytest.raises(KeyError if hvd.rank() == 1 else HorovodInternalError, match=what) as info:
        state.sync()
    check_names(hvd, info.value)
    works(hvd)


@pytest.mark.parametrize("what", ["local_state_dict", "state_dict"])
def test_commit_of_an_elastic_state(hvd: ModuleType, what: str) -> None:
    state = hvd.elastic.TorchState(part=LocalPart(""), epoch=0)
    state.sync()
    state.commit()
    state.part.fails = what if hvd.rank() == 1 else ""
    with pytest.raises(KeyError if hvd.rank() == 1 else HorovodInternalError, match=what) as info:
        state.commit()
    check_names(hvd, info.value)
    works(hvd)


def test_loading_a_checkpoint(hvd: ModuleType, tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path), 0)
    hvd.checkpoint.save(folder, 1, part=Part(""))
    part = Part("load_state_dict" if hvd.rank() == 1 else "")
    with pytest.raises(KeyError if hvd.rank() == 1 else HorovodInternalError, match="load_state_dict") as info:
        hvd.checkpoint.load(folder, part=part)
    check_names(hvd, info.value)
    missing = {"other": Part("")} if hvd.rank() == 1 else {"part": Part("")}
    with pytest.raises(CheckpointError if hvd.rank() == 1 else HorovodInternalError, match="has no part 'other'"):
        hvd.checkpoint.load(folder, **missing)
    works(hvd)


def test_lazy_modules_that_have_no_shape_on_one_rank(hvd: ModuleType) -> None:
    """The text names the parameter and says what to do."""
    model = nn.Sequential(nn.LazyLinear(2))
    if hvd.rank() != 1:
        model(torch.ones(1, 3))
    text = r"broadcast_parameters '0\.weight': .* uninitialized, of a lazy module; run one forward pass first"
    with pytest.raises(UsageError if hvd.rank() == 1 else HorovodInternalError, match=text):
        hvd.broadcast_parameters(model.state_dict(), 0)
    works(hvd)
    model(torch.ones(1, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert same_on_all_ranks(model.parameters())


def test_the_optimizer_state_of_a_lazy_module(hvd: ModuleType) -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(UsageError, match=r"parameter 0 of group 0: .* uninitialized, of a lazy module; run one"):
        hvd.broadcast_optimizer_state(SGD(model.parameters(), lr=0.1), 0)
    with pytest.raises(UsageError, match="uninitialized, of a lazy module; run one forward pass first"):
        hvd.allreduce(model.weight, name="lazy")
    works(hvd)

"""What a compressor remembers is saved, loaded, broadcast and copied, and a run goes on from there bit by bit."""

import copy
import io
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Run
from support.training.problem import same_on_all_ranks
from torch import Tensor

from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.compression import PowerSGD, StatefulCompressor, TopK
from hvlike.errors import UsageError
from hvlike.training.broadcast import broadcast_optimizer_state
from hvlike.training.elastic.checkpoint import gather_optimizer_state

SHAPES = [(20, 30), (6,), (12, 4, 5)]

MAKERS: dict[str, Callable[[], StatefulCompressor]] = {
    "PowerSGD": lambda: PowerSGD(2, start_powerSGD_iter=3, min_compression_rate=1.0),
    "cold PowerSGD": lambda: PowerSGD(2, start_powerSGD_iter=3, min_compression_rate=1.0, warm_start=False),
    "TopK": lambda: TopK(ratio=0.05),
}

kinds = pytest.mark.parametrize("kind", MAKERS)


def through_a_file(state: Any) -> Any:
    """What a checkpoint gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def values(run: Run) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in run.parameters]


def uninterrupted(hvd: ModuleType, kind: str) -> list[Tensor]:
    run = Run(hvd, MAKERS[kind](), SHAPES)
    for step in range(10):
        run.step(step)
    return values(run)


def begun(hvd: ModuleType, kind: str) -> Run:
    run = Run(hvd, MAKERS[kind](), SHAPES)
    for step in range(5):
        run.step(step)
    return run


def continued(hvd: ModuleType, kind: str, parameters: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    """A run of fresh objects that starts from a checkpoint in the middle."""
    run = Run(hvd, MAKERS[kind](), SHAPES)
    with torch.no_grad():
        for parameter, value in zip(run.parameters, parameters, strict=True):
            parameter.copy_(value)
    run.optimizer.load_state_dict(state)
    for step in range(5, 10):
        run.step(step)
    return values(run)


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@kinds
def test_every_rank_saves_and_loads_its_own(hvd: ModuleType, kind: str) -> None:
    run = begun(hvd, kind)
    state = through_a_file(run.optimizer.state_dict())
    result = continued(hvd, kind, values(run), state)
    assert equal(result, uninterrupted(hvd, kind))
    assert same_on_all_ranks(result)


@kinds
def test_one_gathered_state_dict_serves_all_ranks(hvd: ModuleType, kind: str) -> None:
    run = begun(hvd, kind)
    root = hvd.size() - 1
    state = gather_optimizer_state(run.optimizer, root)
    assert (state is None) == (hvd.rank() != root)
    state = through_a_file(broadcast_object(state, root))
    assert equal(continued(hvd, kind, values(run), state), uninterrupted(hvd, kind))


@pytest.mark.mpi(min_size=2)
@kinds
def test_a_checkpoint_of_rank_0_gives_the_others_no_foreign_errors(hvd: ModuleType, kind: str) -> None:
    run = begun(hvd, kind)
    state = broadcast_object(run.optimizer.state_dict(), 0)
    again = Run(hvd, MAKERS[kind](), SHAPES)
    again.optimizer.load_state_dict(state)
    again.step_with([torch.zeros(shape) for shape in SHAPES])
    assert same_on_all_ranks([parameter.grad for parameter in again.parameters])
    errors = again.errors()
    assert bool(errors)
    for error in errors.values():
        assert bool(error.any()) == (hvd.rank() == 0)


@pytest.mark.mpi(min_size=2)
@kinds
def test_errors_of_a_job_of_another_size_are_left_behind(hvd: ModuleType, kind: str) -> None:
    state = begun(hvd, kind).optimizer.state_dict()
    state["compression"]["size"] += 1
    again = Run(hvd, MAKERS[kind](), SHAPES)
    again.optimizer.load_state_dict(state)
    assert again.compression.iteration == 5
    again.step_with([torch.zeros(shape) for shape in SHAPES])
    assert not any(bool(error.any()) for error in again.errors().values())


@pytest.mark.mpi(min_size=2)
@kinds
def test_broadcast_brings_what_is_equal_and_keeps_each_ranks_errors(hvd: ModuleType, kind: str) -> None:
    root = hvd.size() - 1
    state = begun(hvd, kind).optimizer.state_dict()
    if hvd.rank() != root:
        state["compression"] |= {"iteration": 0, "shared": {}}
    run = Run(hvd, MAKERS[kind](), SHAPES)
    run.optimizer.load_state_dict(state)
    broadcast_optimizer_state(run.optimizer, root)
    assert run.compression.iteration == 5
    assert run.compression.mark() == broadcast_object(run.compression.mark(), root)
    errors = run.compression.state_dict()["errors"]
    assert errors.keys() == {hvd.rank()}
    assert equal(list(errors[hvd.rank()].values()), list(state["compression"]["errors"][hvd.rank()].values()))
    for _ in range(2):
        assert same_on_all_ranks(run.step_with([torch.ones(shape) for shape in SHAPES]))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_remember_different_things_go_on_together(hvd: ModuleType) -> None:
    run = begun(hvd, "PowerSGD")
    state = run.optimizer.state_dict()
    if hvd.rank() == 0:
        state["compression"]["iteration"] = 1
        state["compression"]["shared"] = {}
    run.optimizer.load_state_dict(state)
    for step in range(2):
        assert same_on_all_ranks(run.step(step))
    assert run.compression.iteration == 7


@kinds
def test_state_dicts_and_those_of_plain_optimizers_fit_each_other(hvd: ModuleType, kind: str) -> None:
    run = begun(hvd, kind)
    state = run.optimizer.state_dict()
    assert ("compression" in state) == (hvd.size() > 1)
    plain = torch.optim.SGD([torch.nn.Parameter(value) for value in values(run)], lr=1.0, momentum=0.5)
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 0.125
    run.optimizer.load_state_dict(plain.state_dict())
    assert run.compression.state_dict() == {}
    assert same_on_all_ranks(run.step(0))


@kinds
def test_copies_and_pickles_go_on_alike(hvd: ModuleType, kind: str) -> None:
    run = begun(hvd, kind)
    for copy_of in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        optimizer, parameters = copy_of((run.optimizer, run.parameters))
        memory = optimizer.gradients.reducers.reduction.memory
        assert memory is not run.compression
        assert repr(memory) == repr(run.compression)
        assert memory.mark() == run.compression.mark()
        assert memory.errors.keys() == run.compression.errors.keys()
        copied = Run.__new__(Run)
        copied.__dict__ = run.__dict__ | {"optimizer": optimizer, "parameters": parameters, "compression": memory}
        for step in range(5, 10):
            copied.step(step)
        assert equal(values(copied), uninterrupted(hvd, kind))


def test_what_is_no_memory_is_refused(hvd: ModuleType) -> None:
    run = Run(hvd, TopK(k=1), [(3,)])
    with pytest.raises(UsageError, match=r"TopK.load_state_dict expects .* got the keys \['momentum'\]"):
        run.optimizer.load_state_dict(run.optimizer.state_dict() | {"compression": {"momentum": 1}})
    if hvd.size() > 1:
        run.parameters[0].sum().backward()
        with pytest.raises(UsageError, match=r"optimizer.load_state_dict\(\) was called after loss.backward\(\)"):
            run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.optimizer.step()
    with pytest.raises(UsageError, match="gather_optimizer_state expects a DistributedOptimizer, got SGD"):
        gather_optimizer_state(run.optimizer.wrapped)

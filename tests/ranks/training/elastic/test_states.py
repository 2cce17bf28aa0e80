"""States of elastic training: what commit keeps and compares, restore brings back and sync makes equal."""

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike.elastic import ElasticSampler, ObjectState, RandomState, State, TorchState, run
from hvlike.errors import HorovodInternalError, ShapeMismatchError, UsageError


def test_the_attribute_is_there_and_starts_nothing(hvd: ModuleType) -> None:
    assert hvd.elastic.TorchState is TorchState


def test_objects_are_copied_and_come_back(hvd: ModuleType) -> None:
    state = ObjectState(epoch=0, history=[hvd.rank()])
    state.epoch = 3
    state.history.append("not committed")
    state.restore()
    assert (state.epoch, state.history) == (0, [hvd.rank()])
    state.history.append("committed")
    state.commit()
    state.history.append("not committed")
    state.restore()
    assert state.history == [hvd.rank(), "committed"]
    state.history.append("second restore")
    state.restore()
    assert state.history == [hvd.rank(), "committed"]


def test_sync_gives_what_rank_0_has_and_saves_it(hvd: ModuleType) -> None:
    state = ObjectState(epoch=hvd.rank() + 5)
    state.sync()
    assert state.epoch == 5
    state.epoch = 9
    state.restore()
    assert state.epoch == 5
    ObjectState().sync()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "L-BFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def train(hvd: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Some steps on shares of the batch."""
    for step in steps:
        batch = share(hvd, whole_batch(step))

        def closure(batch: tuple[torch.Tensor, torch.Tensor] = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_model_and_optimizer_go_on_from_the_commit(hvd: ModuleType, kind: str, wrapped: bool) -> None:
    model = make_model(seed=hvd.rank())
    optimizer = OPTIMIZERS[kind](model.parameters())
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    state = TorchState(model=model, optimizer=optimizer, batch=0)
    assert state.model is model
    assert state.optimizer is optimizer
    state.sync()
    assert same_on_all_ranks(model.parameters())
    train(hvd, model, optimizer, range(2))
    state.batch = 2
    state.commit()
    train(hvd, model, optimizer, range(2, 4))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    # The way back, also from the middle of a step.
    loss_of(model, share(hvd, whole_batch(9))).backward()
    state.restore()
    assert state.batch == 2
    optimizer.zero_grad()
    state.sync()
    train(hvd, model, optimizer, range(2, 4))
    if wrapped:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
        assert same_on_all_ranks(model.parameters())


def test_schedulers_and_buffers(hvd: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = TorchState(model, optimizer, scheduler=scheduler)
    model(torch.full((4, 2), float(hvd.rank())) + torch.eye(4, 2))
    optimizer.step()
    for _ in range(hvd.rank() + 1):
        scheduler.step()
    state.sync()
    assert same_on_all_ranks(model.state_dict().values())
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.5)
    scheduler.step()
    state.restore()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.5)
    assert state.scheduler is scheduler


def test_setting_a_part_replaces_and_saves_it(hvd: ModuleType) -> None:
    state = TorchState(model=nn.Linear(1, 1), sampler=ElasticSampler(range(4)))
    new = nn.Linear(1, 1)
    start = new.weight.detach().clone()
    state.model = new
    assert state.model is new
    with torch.no_grad():
        new.weight += 1
    state.restore()
    assert torch.equal(new.weight, start)
    with pytest.raises(UsageError, match=r"TorchState\.model was a Linear and cannot become a plain int"):
        state.model = 3
    with pytest.raises(AttributeError, match="no attribute 'optimizer'"):
        _ = state.optimizer


@pytest.mark.parametrize("name", ["save", "sync", "commits", "_saved"])
def test_names_that_a_state_uses_itself(hvd: ModuleType, name: str) -> None:
    for kind in (ObjectState, TorchState):
        with pytest.raises(UsageError, match=f"'{name}' cannot be the name of a value"):
            kind(**{name: 1})


@pytest.mark.mpi(min_size=2)
def test_different_models_are_refused_on_every_rank(hvd: ModuleType) -> None:
    with pytest.raises(ShapeMismatchError):
        TorchState(model=nn.Linear(2, 1 + hvd.rank() % 2)).sync()


def test_reset_and_callbacks(hvd: ModuleType) -> None:
    called: list[str] = []

    class Mine(ObjectState):
        def reset(self) -> None:
            called.append("reset")

    state = Mine()
    state.register_reset_callbacks([lambda: called.append("first")])
    state.register_reset_callbacks([lambda: called.append("second"), lambda: called.append("third")])
    state.on_reset()
    assert called == ["reset", "first", "second", "third"]


def test_a_state_without_its_own_methods_says_so(hvd: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="State does not define save"):
        State().commit()


def draw() -> list[float]:
    """One number of each generator."""
    return [
        torch.rand(1).item(),
        random.random(),
        float(np.random.rand()),  # noqa: NPY002
        float(torch.nn.functional.dropout(torch.ones(64)).sum()),
    ]


def test_steps_that_are_repeated_draw_the_same(hvd: ModuleType) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + hvd.rank())
    state = TorchState(random=RandomState(), step=0)
    state.sync()
    state.commit()
    drawn = [draw() for _ in range(3)]
    # As elastic.run does it after an error.
    state.restore()
    state.on_reset()
    state.sync()
    assert [draw() for _ in range(3)] == drawn
    everybody = hvd.allgather_object(drawn)
    assert len({tuple(first) for first, *_ in everybody}) == hvd.size(), "each rank has numbers of its own"


def test_a_checkpoint_has_those_of_all_ranks(hvd: ModuleType, tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path))
    torch.manual_seed(5 + hvd.rank())
    hvd.checkpoint.save(folder, 1, random=RandomState())
    drawn = draw()
    draw()
    hvd.checkpoint.load(folder, random=RandomState())
    assert draw() == drawn


LAST = 6


@run
def add_up(state: TorchState, hvd: ModuleType, faults: dict[int, object]) -> None:
    """Each step adds 1 to the parameters of all ranks; does what a fault says, once, at the step it is for."""
    while state.step < LAST:
        state.step += 1
        fault = faults.pop(state.step, None)
        if isinstance(fault, Exception):
            raise fault
        with torch.no_grad():
            for each in state.model.parameters():
                each += 1 + (hvd.rank() == fault)
        state.commit()


def trained(hvd: ModuleType, faults: dict[int, object]) -> float:
    """What the last parameter has got."""
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    add_up(TorchState(model=model, step=0), hvd, faults)
    return model.bias[1].item()


@pytest.mark.mpi(min_size=2)
def test_a_wrong_sum_after_a_failure_is_taken_back(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    # The last rank gets another value in the first step after the restart.
    again = {3: HorovodInternalError("injected")}
    faults = again | {4: hvd.size() - 1}
    assert trained(hvd, faults) == LAST
    assert not faults
    text = next(each for each in caplog.messages if "MismatchError" in each)
    assert "commit 4: parameter model.weight differs between ranks" in text
    assert f"on ranks [{hvd.size() - 1}]" in text
    assert "2 of 2 parameters differ" in text


@pytest.mark.mpi(min_size=2)
def test_a_difference_that_does_not_go_away_ends_the_run(hvd: ModuleType) -> None:
    class Always(dict[int, object]):
        def pop(self, step: int, *_: object) -> object:
            return super().pop(step, hvd.size() - 1 if step > 3 else None)

    with pytest.raises(HorovodInternalError, match=r"gives up: 4 failures .* commit 4: parameter model\.weight"):
        trained(hvd, Always({3: HorovodInternalError("injected")}))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_train_by_themselves_are_warned_once(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    faults: dict[int, object] = {1: hvd.size() - 1, 2: hvd.size() - 1, 4: HorovodInternalError("injected"), 5: 0}
    # After the restart all have what rank 0 has; in step 5 it adds 2.
    assert trained(hvd, faults) == LAST + (hvd.rank() == 0)
    warned = [each for each in caplog.messages if "differs between ranks" in each]
    assert len(warned) == (hvd.rank() == 0)
    assert all("all start from those of rank 0" in each for each in warned)

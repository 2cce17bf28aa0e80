"""Durable commits and preemption: what is on the disk is what was committed, and all ranks end at the same commit."""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import make_model

from hvlike.elastic import EXIT_PREEMPTED, ElasticSampler, ObjectState, TorchState, preempted, run
from hvlike.errors import CheckpointError, HorovodInternalError, UsageError
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.elastic import local_state
from hvlike.training.elastic.checkpoint_files import list_files
from hvlike.training.elastic.local_state import find_sources

Restart = Callable[[Mapping[str, str]], None]
STEPS = 8


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path, restarted: Restart) -> Path:
    """A checkpoint folder, the same on every rank, to which every commit is written."""
    shared: Path = hvd.broadcast_object(tmp_path, name="folder") / "commits"
    restarted({"HVLIKE_CHECKPOINT_DIR": str(shared), "HVLIKE_CHECKPOINT_SECONDS": "0"})
    return shared


def new_state(hvd: ModuleType, *, sharded: bool = False) -> TorchState:
    model, options = make_model(seed=0), {"lr": 0.1, "momentum": 0.9}
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, reduce_gradients=True, **options)
    else:
        sgd = torch.optim.SGD(model.parameters(), **options)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    return TorchState(
        model=model, optimizer=optimizer, sampler=ElasticSampler(range(24 * hvd.size()), seed=3), step=0, seen=[]
    )


@run
def train(state: TorchState, hvd: ModuleType, until: int, at: int = -1, event: Callable[[], object] = print) -> None:
    """Train to a step; an event before the commit of one."""
    for batch in range(until - state.step):
        torch.manual_seed(100 * state.step + hvd.rank())
        inputs = torch.randn(4, state.model[0].in_features)
        state.optimizer.zero_grad()
        state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.seen.append(hvd.allgather_object(state.sampler.get_indices(batch, 2)))
        state.sampler.record_batch(batch, 2)
        state.step += 1
        if state.step == at:
            event()
        state.commit()


def result(state: TorchState) -> tuple[list[list[float]], list[list[int]]]:
    return [each.flatten().tolist() for each in state.model.parameters()], state.seen


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("damage", [False, True])
def test_training_goes_on_from_the_newest_whole_commit(
    hvd: ModuleType, folder: Path, damage: bool, sharded: bool
) -> None:
    whole = new_state(hvd, sharded=sharded)
    train(whole, hvd, STEPS)
    for file in list_files(folder) if hvd.rank() == 0 else []:
        file.path.unlink()
    train(new_state(hvd, sharded=sharded), hvd, 5)
    if damage and hvd.rank() == 0:
        list_files(folder)[0].path.write_bytes(b"damaged")
    hvd.barrier()
    state = new_state(hvd, sharded=sharded)
    train(state, hvd, STEPS)
    assert state.commits == STEPS
    assert result(state) == result(whole)
    assert [file.step for file in list_files(folder)] == [STEPS, STEPS - 1]


def test_after_an_error_the_commit_in_memory_counts(hvd: ModuleType, folder: Path) -> None:
    failures = iter([True])

    def fail() -> None:
        if next(failures, False):
            raise HorovodInternalError("injected")

    state, whole = new_state(hvd), new_state(hvd)
    train(state, hvd, STEPS, 3, fail)
    assert state.commits == STEPS
    for file in list_files(folder) if hvd.rank() == 0 else []:
        file.path.unlink()
    hvd.barrier()
    train(whole, hvd, STEPS)
    assert result(state) == result(whole)


@pytest.fixture
def rank_0_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error nobody has what only rank 0 had."""

    def find(told: Any) -> Any:
        found = find_sources(told)
        return found and (found[0], {owner: holder for owner, holder in found[1].items() if owner})

    monkeypatch.setattr(local_state, "find_sources", find)


@pytest.mark.usefixtures("rank_0_is_lost")
def test_what_nobody_has_any_more_comes_from_the_disk(
    hvd: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([True])

    def fail() -> None:
        if next(failures, False):
            if hvd.rank() == 0:
                list_files(folder)[0].path.unlink()
            raise HorovodInternalError("injected")

    state = new_state(hvd, sharded=True)
    with caplog.at_level(logging.WARNING, "hvlike"):
        train(state, hvd, STEPS, 5, fail)
    if hvd.rank() == 0:
        assert "commit 4: what only ranks [0] of" in caplog.text
        assert "goes back to the disk, and starts from commit 3" in caplog.text
    for file in list_files(folder) if hvd.rank() == 0 else []:
        file.path.unlink()
    hvd.barrier()
    whole = new_state(hvd, sharded=True)
    train(whole, hvd, STEPS)
    assert result(state) == result(whole)


@pytest.mark.usefixtures("rank_0_is_lost")
def test_what_nobody_has_any_more_is_an_error_on_every_rank_without_a_disk(hvd: ModuleType) -> None:
    def fail() -> None:
        raise HorovodInternalError("injected")

    with pytest.raises(
        CheckpointError, match=r"only ranks \[0\] of \d had of optimizer is lost.*HVLIKE_CHECKPOINT_DIR"
    ):
        train(new_state(hvd, sharded=True), hvd, STEPS, 5, fail)
    hvd.barrier()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_ends_all_at_the_same_commit(
    hvd: ModuleType, folder: Path, restarted: Restart, number: signal.Signals
) -> None:
    restarted({"HVLIKE_CHECKPOINT_SECONDS": "1000"})

    def signal_one() -> None:
        if hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), number)

    state = new_state(hvd)
    with pytest.raises(SystemExit) as caught:
        train(state, hvd, STEPS, 3, signal_one)
    assert caught.value.code == EXIT_PREEMPTED
    assert state.step == 3
    assert not hvd.is_initialized()
    assert [file.step for file in list_files(folder)] == [3]


def test_handlers_are_there_for_the_training_only(hvd: ModuleType, folder: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    inside: list[Any] = []
    train(new_state(hvd), hvd, 1, 1, lambda: inside.append(signal.getsignal(signal.SIGTERM)))
    assert inside[0] not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_loops_of_ones_own_ask(hvd: ModuleType, restarted: Restart) -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        assert not preempted()
        if hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert preempted()
        assert preempted()
        assert heard == ([signal.SIGUSR1] if hvd.rank() == 0 else [])
        restarted({})
        assert not preempted()
    finally:
        restarted({})
        signal.signal(signal.SIGUSR1, previous)


def test_a_value_that_cannot_be_written_is_named_at_the_start(hvd: ModuleType, folder: Path) -> None:
    steps: list[int] = []

    @run
    def training(state: ObjectState) -> None:
        steps.append(1)

    with pytest.raises(UsageError, match="helper holds a object"):
        training(ObjectState(helper=object()))
    assert steps == []


def test_commits_go_on_when_the_disk_does_not_take_them(
    hvd: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if hvd.rank() == 0:
        folder.mkdir()
        # As long as this is there, nothing can be put in its place.
        (folder / f".checkpoint-{os.getpid()}").mkdir()
    hvd.barrier()
    state = ObjectState(step=0)

    @run
    def training(state: ObjectState) -> None:
        state.step = 1
        state.commit()

    training(state)
    assert state.commits == 1
    assert ("commit 1 is not durable" in caplog.text) == (hvd.rank() == 0)
    assert list_files(folder) == []

"""Checkpoints of a job: all ranks get what rank 0 has written; what is damaged is passed over; all learn of errors."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hvlike import checkpoint
from hvlike.errors import CheckpointError, DeadlockError, UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Path:
    """The same on every rank."""
    shared: Path = hvd.broadcast_object(tmp_path, name="folder")
    return shared


def make_optimizer(hvd: ModuleType, model: nn.Module, kind: str) -> Any:
    if kind == "ZeRO":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, reduce_gradients=True)
    return hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())


def train(hvd: ModuleType, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.manual_seed(step * hvd.size() + hvd.rank())
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


@pytest.mark.parametrize("kind", ["plain", "ZeRO"])
def test_a_training_goes_on_as_if_it_had_not_stopped(hvd: ModuleType, folder: Path, kind: str) -> None:
    model = model_of(0)
    optimizer = make_optimizer(hvd, model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(hvd, model, optimizer, range(3))
    path = checkpoint.save(folder, 3, model=model, optimizer=optimizer, scheduler=scheduler, seen=[1, "two", {3: None}])
    assert hvd.rank() > 0 or Path(path).exists()
    train(hvd, model, optimizer, range(3, 5))
    # Other weights on every rank.
    resumed = model_of(1 + hvd.rank())
    other = make_optimizer(hvd, resumed, kind)
    loaded = checkpoint.load(folder, model=resumed, optimizer=other)
    assert loaded is not None
    assert (loaded.step, loaded.path, loaded.values["seen"]) == (3, path, [1, "two", {3: None}])
    assert set(loaded.values) == {"scheduler", "seen"}
    train(hvd, resumed, other, range(3, 5))
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(resumed.bias, model.bias)


def test_a_wrapped_model_is_saved_as_the_model(hvd: ModuleType, folder: Path) -> None:
    model = model_of(0)
    checkpoint.save(folder, 1, model=DistributedDataParallel(model))
    for target in (model_of(1), DistributedDataParallel(model_of(2))):
        checkpoint.load(folder, model=target)
        assert torch.equal(next(target.parameters()), model.weight)


def test_a_damaged_checkpoint_is_passed_over(hvd: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [checkpoint.save(folder, step, keep=3, value=step) for step in (1, 2, 3)]
    if hvd.rank() == 0:
        Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:-7])
    with caplog.at_level(logging.WARNING, logger="hvlike"):
        loaded = checkpoint.load(folder)
    assert loaded is not None
    assert (loaded.step, loaded.values) == (2, {"value": 2})
    assert (f"checkpoint {paths[2]} is passed over" in caplog.text) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        for path in paths[:2]:
            Path(path).write_bytes(b"")
    with pytest.raises(CheckpointError, match="can be read") as error:
        checkpoint.load(folder)
    assert all(Path(path).name in str(error.value) for path in paths)


def test_without_a_checkpoint_there_is_nothing_to_load(hvd: ModuleType, folder: Path) -> None:
    assert checkpoint.load(folder / "not there", model=model_of(0)) is None


def test_a_folder_that_cannot_be_written_to_is_an_error_on_all_ranks(hvd: ModuleType, folder: Path) -> None:
    if hvd.rank() == 0:
        (folder / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write a checkpoint of step 1 into .*file"):
        checkpoint.save(folder / "file", 1, value=1)
    # All go on.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after") == hvd.size()


def test_a_state_that_cannot_be_had_is_an_error_on_all_ranks(hvd: ModuleType, folder: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("no state")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(CheckpointError, match="KeyError: 'no state'"):
        checkpoint.save(folder, 1, odd=Odd())


def test_a_part_that_was_not_saved_is_named(hvd: ModuleType, folder: Path) -> None:
    checkpoint.save(folder, 1, model=model_of(0), epoch=4)
    with pytest.raises(CheckpointError, match=r"has no part 'net'; it has epoch, model"):
        checkpoint.load(folder, net=model_of(0))
    with pytest.raises(UsageError, match=r"epoch is a int, which cannot be loaded into.*loaded.values"):
        checkpoint.load(folder, epoch=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": -1, "value": 1}, "step must be a whole number"),
        ({"step": 1, "value": 1, "keep": 0}, "keep must be a whole number of at least 1"),
        ({"step": 1}, "there is nothing to save"),
        ({"step": 1, "value": [object()]}, "value holds a object, which is no plain value"),
    ],
)
def test_wrong_arguments(hvd: ModuleType, folder: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        checkpoint.save(folder, **arguments)
    assert list(folder.iterdir()) == []


class Own:
    """A class that torch.load does not know to be safe."""

    def __init__(self) -> None:
        self.counter = 0

    def state_dict(self) -> dict[str, Any]:
        return {"own": self}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counter = state["own"].counter


def test_classes_of_others_are_loaded_only_when_the_file_is_trusted(hvd: ModuleType, folder: Path) -> None:
    own, other = Own(), Own()
    own.counter = 7
    checkpoint.save(folder, 1, own=own)
    with pytest.raises(CheckpointError, match="pass trusted=True"):
        checkpoint.load(folder, own=other)
    checkpoint.load(folder, own=other, trusted=True)
    assert other.counter == 7


CALLS: dict[str, Callable[[Path, nn.Module], Any]] = {
    "save": lambda folder, model: checkpoint.save(folder, 1, model=model),
    "load": lambda folder, model: checkpoint.load(folder, model=model),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_only_one_rank_makes_is_named_as_the_user_has_written_it(
    hvd: ModuleType, folder: Path, call: str
) -> None:
    model = model_of(0)
    with pytest.raises(DeadlockError, match=rf"rank 0 waits in \w+ 'hvd\.checkpoint\.{call}\b"):
        CALLS[call](folder, model) if hvd.rank() == 0 else hvd.barrier()
    checkpoint.save(folder, 2, model=model)
    loaded = checkpoint.load(folder, model=model)
    assert loaded is not None
    assert loaded.step == 2

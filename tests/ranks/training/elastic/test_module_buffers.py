"""Buffers of a model: each rank has its own again; all have those of rank 0 where the number of ranks changed."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.pretended_loss import COMMIT, after_loss, give_back
from torch import Tensor, nn

from hvlike.elastic import TorchState, run
from hvlike.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvlike.training.elastic import local_state
from hvlike.training.elastic.checkpoint import save_all
from hvlike.training.elastic.checkpoint_files import list_files
from hvlike.training.elastic.local_parts import ModuleBuffers
from hvlike.training.elastic.local_state import find_sources

STEPS = 5


class Model(nn.Sequential):
    """Has statistics of its rank, a table of constants, and a cache that no state dict has."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


@run
def train(state: TorchState, hvd: ModuleType, failures: list[int], kind: type[Exception]) -> None:
    """Each rank sees other batches; fails once after each of these steps, before its commit."""
    while state.step < STEPS:
        generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        state.model(torch.randn(8, 3, generator=generator))
        state.step += 1
        if state.step in failures:
            failures.remove(state.step)
            raise kind("injected")
        state.commit()


def statistics(model: nn.Module) -> list[Tensor]:
    """A copy of what has to be the same."""
    return [each.clone() for each in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all bits are the same."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def trained(hvd: ModuleType, failures: list[int], kind: type[Exception] = HorovodInternalError) -> list[Tensor]:
    """What the statistics of this rank are at the end."""
    torch.manual_seed(0)
    state = TorchState(model=Model(), step=0)
    train(state, hvd, failures, kind)
    return statistics(state.model)


def test_each_rank_has_its_own_after_an_error(hvd: ModuleType) -> None:
    whole = trained(hvd, [])
    assert same(trained(hvd, [3]), whole)
    assert same(trained(hvd, [1, 2, 5]), whole)
    # Without going back: training starts again with the state as it is.
    assert same(trained(hvd, [1, 4], HostsUpdatedInterrupt), whole)
    everybody = hvd.allgather_object(whole)
    assert hvd.size() == 1 or not same(everybody[0], everybody[1]), "each rank has its own"


def test_what_is_the_same_object_to_a_program_stays_it(hvd: ModuleType) -> None:
    state = TorchState(model=Model(), step=0)
    before = state.model[1].running_mean
    train(state, hvd, [2], HorovodInternalError)
    assert state.model[1].running_mean is before
    assert set(ModuleBuffers(state.model).local_state_dict()) == {
        "table",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_with_fewer_ranks_all_have_those_of_rank_0(hvd: ModuleType) -> None:
    before = hvd.size() + 1
    states: dict[int, dict[str, Any]] = {}
    for rank in range(before):
        model = Model()
        model[1].running_mean.fill_(rank + 10)
        states[rank] = ModuleBuffers(model).local_state_dict()
    for lost in range(before):
        model = Model()
        give_back(after_loss(hvd, states, [lost]), COMMIT, ModuleBuffers(model))
        assert model[1].running_mean.tolist() == [10] * 4


def test_names_are_those_of_the_model_without_a_wrapper(hvd: ModuleType) -> None:
    model = Model()
    wrapped = hvd.nn.DistributedDataParallel(model)
    assert list(ModuleBuffers(wrapped).local_state_dict()) == list(ModuleBuffers(model).local_state_dict())


def test_a_model_that_takes_the_place_of_another_has_its_own(hvd: ModuleType) -> None:
    state = TorchState(model=nn.BatchNorm1d(2))
    state.sync()
    state.commit()
    state.model = nn.BatchNorm1d(7)
    state.model.running_mean.fill_(hvd.rank())
    state.commit()
    state.model.running_mean.fill_(-1)
    state.restore()
    state.on_reset()
    state.sync()
    assert state.model.running_mean.tolist() == [hvd.rank()] * 7


def test_training_goes_on_with_those_of_rank_0_where_nobody_has_them(
    hvd: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(told: Any) -> Any:
        found = find_sources(told)
        return found and (found[0], {owner: holder for owner, holder in found[1].items() if owner})

    monkeypatch.setattr(local_state, "find_sources", find)
    state = TorchState(model=nn.BatchNorm1d(2))
    state.sync()
    state.model.running_mean.fill_(hvd.rank() + 3)
    state.commit()
    with caplog.at_level(logging.WARNING, "hvlike"):
        state.restore()
        state.on_reset()
        state.sync()
    assert state.model.running_mean.tolist() == [3, 3]
    told = f"commit 1: the model.buffers of ranks [0] of {hvd.size()} are lost"
    assert (told in caplog.text) == (hvd.rank() == 0)


Restart = Callable[[Mapping[str, str]], None]


def test_a_checkpoint_has_those_of_all_ranks(hvd: ModuleType, tmp_path: Path, restarted: Restart) -> None:
    folder: Path = hvd.broadcast_object(tmp_path) / "commits"
    restarted({"HVLIKE_CHECKPOINT_DIR": str(folder), "HVLIKE_CHECKPOINT_SECONDS": "0"})
    whole = trained(hvd, [])
    # A new state, as in a new job, begins where the last one has ended.
    assert same(trained(hvd, []), whole)
    if hvd.rank() == 0:
        saved = torch.load(list_files(folder)[0].path, weights_only=False)["model.buffers"]
        assert saved["ranks"] == hvd.size()
        different = {name for each in saved["different"].values() for name in each}
        assert different == ({"1.running_mean", "1.running_var"} if hvd.size() > 1 else set())


def test_a_checkpoint_of_other_ranks_gives_those_of_rank_0(hvd: ModuleType) -> None:
    model = nn.BatchNorm1d(2)
    mine = {"running_mean": torch.full((2,), 5.0)}
    ModuleBuffers(model).load_state_dict({"ranks": hvd.size() + 1, "different": {hvd.rank(): mine}})
    assert model.running_mean.tolist() == [0, 0]
    ModuleBuffers(model).load_state_dict({"ranks": hvd.size(), "different": {hvd.rank(): mine}})
    assert model.running_mean.tolist() == [5, 5]


def test_a_checkpoint_from_before_buffers_were_saved_is_loaded(
    hvd: ModuleType, tmp_path: Path, restarted: Restart
) -> None:
    folder: Path = hvd.broadcast_object(tmp_path) / "commits"
    torch.manual_seed(0)
    model = Model()
    save_all(folder, 1, {"model": model, "step": STEPS})
    restarted({"HVLIKE_CHECKPOINT_DIR": str(folder)})
    assert same(trained(hvd, []), statistics(model))


def test_sparse_buffers(hvd: ModuleType) -> None:
    """They go back, too, and come from rank 0 at the start."""
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse() * (hvd.rank() + 1))
    state = hvd.elastic.TorchState(model=model, epoch=0)
    state.sync()
    assert torch.equal(model.adjacency.to_dense(), torch.eye(2))
    state.commit()
    model.adjacency.mul_(5)
    state.restore()
    assert torch.equal(model.adjacency.to_dense(), torch.eye(2))

"""Each rank saves its share in a file of its own; another number of ranks loads them and goes on as if nothing was."""

import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.zero_problem import batch, difference, loss_of, net
from torch.optim import Adam

from hvlike.errors import UsageError
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.zero.sharded_state import make_shard, merge_shards


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


@pytest.mark.parametrize("saved_by", [1, 2, 3, 5])
def test_shards_of_any_number_of_ranks_continue_the_run(hvd: ModuleType, saved_by: int) -> None:
    """The shards are cut from a plain run's state, as that many ranks would have saved them."""
    ours, plain = net(), net()
    reference = Adam(plain.parameters(), lr=0.01)
    train(plain, reference, range(3))
    ours.load_state_dict(plain.state_dict())
    whole = reference.state_dict()

    def files() -> Iterator[dict[str, Any]]:
        for rank in reversed(range(saved_by)):
            part = {place: value for place, value in whole["state"].items() if place % saved_by == rank}
            file = io.BytesIO()
            torch.save(make_shard({**whole, "state": part}, rank, saved_by, 3), file)
            file.seek(0)
            yield torch.load(file)

    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, lr=0.5)
    optimizer.load_sharded_state_dict(files())
    train(ours, optimizer, range(3, 6))
    train(plain, reference, range(3, 6))
    assert difference(ours, plain) == 0
    assert optimizer.sharded_state_dict()["shard"] == {"rank": hvd.rank(), "size": hvd.size(), "step": 6}


def test_what_the_ranks_save_is_the_whole(hvd: ModuleType) -> None:
    ours, plain = net(), net()
    optimizer, reference = ZeroRedundancyOptimizer(ours.parameters(), Adam), Adam(plain.parameters())
    train(ours, optimizer, range(2))
    train(plain, reference, range(2))
    shards = hvd.allgather_object(optimizer.sharded_state_dict())
    places = [place for shard in shards for place in shard["state"]]
    assert sorted(places) == list(range(6))
    whole, step = merge_shards(shards, range(6))
    assert step == 2
    reference.load_state_dict(whole)
    train(ours, optimizer, range(2, 4))
    train(plain, reference, range(2, 4))
    assert difference(ours, plain) == 0


def shard(rank: int, size: int = 2, step: int = 7) -> dict[str, Any]:
    return make_shard({"state": {rank: {}}, "param_groups": []}, rank, size, step)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([], "there are no shards"),
        ([shard(0)], r"the shards of ranks \[1\] of 2 are missing"),
        ([shard(0), shard(0)], "rank 0 came twice"),
        ([shard(0), shard(1, step=8)], "rank 0 is one of 2 after step 7, that of rank 1 is one of 2 after step 8"),
        ([shard(0), shard(1, size=3)], "that of rank 1 is one of 3"),
        ([{"state": {}, "param_groups": []}], "goes to load_state_dict"),
    ],
)
def test_shards_that_do_not_belong_together(shards: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        merge_shards(shards, range(2))


@pytest.mark.pure
def test_only_what_is_wanted_is_kept() -> None:
    state, step = merge_shards([shard(1), shard(0)], [1])
    assert (sorted(state["state"]), step) == ([1], 7)

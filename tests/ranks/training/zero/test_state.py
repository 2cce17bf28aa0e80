"""State dicts: consolidated on one rank they are those of the plain optimizer; shards load on any number of ranks."""

import copy
import io
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.zero_problem import batch, difference, loss_of, net
from torch.optim import SGD, Adam

from hvlike.collectives.session.context import current
from hvlike.errors import UsageError
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.zero.sharded_state import HERE, make_shard, merge_shards, state_service


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


@pytest.mark.parametrize("optimizer_class", [SGD, Adam])
def test_state_goes_to_the_plain_optimizer_and_back(hvd: ModuleType, optimizer_class: type) -> None:
    keywords: dict[str, Any] = (
        {"lr": 0.01, "momentum": 0.9} if optimizer_class is SGD else {"lr": 0.01, "amsgrad": True}
    )
    ours, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), optimizer_class, **keywords)
    reference = optimizer_class(plain.parameters(), **keywords)
    train(ours, optimizer, range(3))
    train(plain, reference, range(3))
    target = hvd.size() - 1
    optimizer.consolidate_state_dict(to=target)
    saved = hvd.broadcast_object(optimizer.state_dict() if hvd.rank() == target else None, root_rank=target)
    expected = reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert list(saved["state"]) == list(range(6))
    for number, values in expected["state"].items():
        assert sorted(saved["state"][number]) == sorted(values)
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(saved["state"][number][key]), torch.as_tensor(value))
    # Crossed: each goes on with what the other has saved.
    optimizer.load_state_dict(expected)
    reference.load_state_dict(saved)
    train(ours, optimizer, range(3, 6))
    train(plain, reference, range(3, 6))
    assert difference(ours, plain) == 0


def test_a_state_that_was_consolidated_is_on_that_rank_alone(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)
    train(model, optimizer, range(1))
    optimizer.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        assert sorted(optimizer.state_dict()["state"]) == list(range(6))
    else:
        with pytest.raises(RuntimeError, match=rf"call `consolidate_state_dict\(to={hvd.rank()}\)` on all ranks"):
            optimizer.state_dict()


@pytest.mark.parametrize("who", ["the first", "the last", "all"])
def test_without_consolidation_the_others_are_asked(hvd: ModuleType, who: str) -> None:
    """What they are doing meanwhile does not matter; an older consolidated state is not returned."""
    model, plain = net(), net()
    optimizer, reference = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01), Adam(plain.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    optimizer.consolidate_state_dict(to=0)
    train(model, optimizer, range(1, 3))
    train(plain, reference, range(3))
    asking = {"the first": [0], "the last": [hvd.size() - 1], "all": range(hvd.size())}[who]
    if hvd.rank() in asking:
        found, expected = optimizer.state_dict(), reference.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert list(found["state"]) == list(expected["state"])
        for number, values in expected["state"].items():
            assert all(torch.equal(found["state"][number][key], value) for key, value in values.items())
    hvd.barrier()
    train(model, optimizer, range(3, 4))
    train(plain, reference, range(3, 4))
    assert difference(model, plain) == 0


@pytest.mark.mpi(min_size=2)
def test_one_rank_asks_before_another_answers_for_the_optimizer(hvd: ModuleType) -> None:
    """As in the moment in which a constructor has ended on one rank and not on the other."""
    optimizer = ZeroRedundancyOptimizer(net().parameters(), Adam, lr=0.01)
    service, key = state_service(current()), (0, "made later")
    if hvd.rank() == 1:
        time.sleep(0.3)
        service.register(key, optimizer)
    if hvd.rank() == 0:
        assert service.fetch(1, key, 0) == (HERE, {})
    hvd.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_state_that_cannot_be_had_is_not_made_up(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)
    train(model, optimizer, range(1))
    last = hvd.size() - 1
    if hvd.rank() == last:
        optimizer.step_share(None, {})
    hvd.barrier()
    if hvd.rank() == 0:
        with pytest.raises(
            RuntimeError, match=f"has not been consolidated on this rank.*Rank {last} has made more steps"
        ):
            optimizer.state_dict()
    hvd.barrier()
    if hvd.rank() == last:
        del optimizer
    hvd.barrier()
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match=f"Rank {last} no longer has the optimizer"):
            optimizer.state_dict()
    hvd.barrier()


def test_a_consolidated_state_is_a_copy(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)
    train(model, optimizer, range(1))
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if hvd.rank() == 0 else None
    before = None if state is None else {key: value["exp_avg"].clone() for key, value in state["state"].items()}
    train(model, optimizer, range(1, 3))
    if state is not None and before is not None and hvd.size() > 1:
        assert all(torch.equal(state["state"][key]["exp_avg"], value) for key, value in before.items())


@pytest.mark.parametrize("to", [-1, 99, True, "0"])
def test_a_rank_that_does_not_exist(hvd: ModuleType, to: object) -> None:
    optimizer = ZeroRedundancyOptimizer(net().parameters(), Adam)
    with pytest.raises(ValueError, match="expected a rank from 0 to"):
        optimizer.consolidate_state_dict(to=to)  # type: ignore[arg-type]


def test_no_copies(hvd: ModuleType) -> None:
    optimizer = ZeroRedundancyOptimizer(net().parameters(), Adam)
    with pytest.raises(ValueError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_groups_that_do_not_fit_are_refused(hvd: ModuleType) -> None:
    optimizer = ZeroRedundancyOptimizer(net().parameters(), Adam)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("no")


def test_a_state_that_cannot_be_pickled_is_refused_on_every_rank(hvd: ModuleType) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01)
    train(model, optimizer, range(1))
    if hvd.rank() == hvd.size() - 1:
        next(iter(optimizer.optim.state.values()))["odd"] = Unpicklable()
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match=r"cannot be pickled \(OSError: no\)"):
            optimizer.consolidate_state_dict(to=0)
    hvd.barrier()


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

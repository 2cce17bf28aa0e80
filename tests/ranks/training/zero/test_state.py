"""State dicts: consolidated on one rank they are those of the plain optimizer, and every rank loads its share."""

import copy
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.zero_problem import batch, difference, loss_of, net
from torch.optim import SGD, Adam

from hvlike.collectives.session.context import current
from hvlike.optim import ZeroRedundancyOptimizer
from hvlike.training.zero.sharded_state import HERE, state_service


def test_the_numbers_of_torchs_test(hvd: ModuleType) -> None:
    x = torch.tensor([1.0], requires_grad=True)
    optimizer = ZeroRedundancyOptimizer([x], SGD, lr=0.1, momentum=0.9)
    x.backward()
    optimizer.step()
    assert x.item() == pytest.approx(0.9)
    if hvd.rank() == 0:
        assert optimizer.optim.state[x]["momentum_buffer"] == torch.tensor([1.0])
    optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    saved = hvd.broadcast_object(optimizer.state_dict() if hvd.rank() == 0 else None)
    assert sorted(saved) == ["param_groups", "state"]
    assert saved["param_groups"][0]["lr"] == 0.1
    assert saved["state"][0]["momentum_buffer"] == torch.tensor([1.0])

    other = ZeroRedundancyOptimizer([x], SGD, lr=0.01)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == other.optim.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["momentum"] == 0.9
    x.backward()
    other.step()
    assert x.item() == pytest.approx(0.71)
    if hvd.rank() == 0:
        assert other.optim.state[x]["momentum_buffer"].item() == pytest.approx(1.9)


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

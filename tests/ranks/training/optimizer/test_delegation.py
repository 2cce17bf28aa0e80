"""A DistributedOptimizer is the optimizer it wraps: same groups, state, hooks, attributes, state dicts and classes."""

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike import DistributedOptimizer


def train(hvd: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, whole_batch(step)).backward()
        optimizer.step()


def make(cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, Any, Any]:
    model = make_model()
    plain = cls(model.parameters(), lr=0.01)
    return model, plain, DistributedOptimizer(plain, named_parameters=model.named_parameters())


def test_it_is_an_instance_of_both_classes(hvd: ModuleType) -> None:
    _, _, optimizer = make(torch.optim.SGD)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, DistributedOptimizer)
    assert not isinstance(optimizer, torch.optim.Adam)


def test_groups_state_and_defaults_are_shared(hvd: ModuleType) -> None:
    model, plain, optimizer = make()
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.defaults is plain.defaults
    train(hvd, model, optimizer, range(2))
    assert optimizer.state is plain.state
    assert len(plain.state) == len(list(model.parameters()))


def test_state_from_before_wrapping_is_kept(hvd: ModuleType) -> None:
    model = make_model()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    train_plain(model, plain, range(3))
    expected = make_model()
    expected_optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, eps=1e-3)
    train_plain(expected, expected_optimizer, range(6))
    train(hvd, model, DistributedOptimizer(plain), range(3, 6))
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6


def test_other_attributes_are_those_of_the_wrapped_optimizer(hvd: ModuleType) -> None:
    _, plain, optimizer = make()
    optimizer.note = "set on the wrapper"
    assert plain.note == "set on the wrapper"
    plain.note = "changed"
    assert optimizer.note == "changed"
    del optimizer.note
    assert not hasattr(plain, "note")
    with pytest.raises(AttributeError, match="note"):
        _ = optimizer.note


def test_repr_names_both(hvd: ModuleType) -> None:
    assert repr(make()[2]).startswith("DistributedOptimizer(AdamW (")


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS])
def test_state_dicts_are_interchangeable_with_a_plain_optimizer(hvd: ModuleType, cls: Any) -> None:
    model, plain, optimizer = make(cls)
    closure = None
    if cls is not torch.optim.LBFGS:
        train(hvd, model, optimizer, range(2))
    else:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, share(hvd, whole_batch()))
            loss.backward()
            return loss

        optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved.keys() == plain.state_dict().keys()
    other = cls(make_model(1).parameters(), lr=0.5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.01
    another = DistributedOptimizer(cls(make_model(2).parameters(), lr=0.5))
    another.load_state_dict(other.state_dict())
    assert str(another.state_dict()) == str(saved)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("when", ["fresh", "after some steps"])
def test_copies_go_on_like_the_original(hvd: ModuleType, way: str, when: str) -> None:
    model, _, optimizer = make()
    if when != "fresh":
        train(hvd, model, optimizer, range(2))
    pair = (model, optimizer)
    twin, twin_optimizer = pickle.loads(pickle.dumps(pair)) if way == "pickle" else copy.deepcopy(pair)
    assert isinstance(twin_optimizer, DistributedOptimizer)
    assert isinstance(twin_optimizer, torch.optim.AdamW)
    assert twin_optimizer.param_groups[0]["params"][0] is next(twin.parameters())
    train(hvd, model, optimizer, range(2, 4))
    train(hvd, twin, twin_optimizer, range(2, 4))
    assert largest_difference(model.parameters(), twin.parameters()) < 1e-6
    assert same_on_all_ranks(twin.parameters())


def test_a_copy_on_one_rank_alone_does_no_harm(hvd: ModuleType) -> None:
    model, _, optimizer = make()
    kept = copy.deepcopy((model, optimizer)) if hvd.rank() == 0 else None
    train(hvd, model, optimizer, range(2))
    other, _, other_optimizer = make()
    train(hvd, other, other_optimizer, range(2))
    assert same_on_all_ranks(other.parameters())
    assert kept is None or isinstance(kept[1], DistributedOptimizer)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(hvd: ModuleType, protocol: int) -> None:
    _, _, optimizer = make()
    assert isinstance(pickle.loads(pickle.dumps(optimizer, protocol)), DistributedOptimizer)


def test_step_hooks_run_once_and_see_reduced_gradients(hvd: ModuleType) -> None:
    model, _, optimizer = make()
    seen: list[str] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(f"before, same {same_on_all_ranks(p.grad for p in model.parameters())}")
    )
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(hvd, model, optimizer, range(1))
    assert seen == ["before, same True", "after"]


def test_state_dict_hooks_run_once(hvd: ModuleType) -> None:
    _, _, optimizer = make()
    seen: list[str] = []
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loaded"]


def test_the_constructor_can_be_called_like_horovods(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        hvd.Compression.none,
        2,
        hvd.Average,
        1.0,
        0,
        None,
        False,
        hvd.global_process_set,
    )
    assert optimizer.backward_passes_per_step == 2
    assert optimizer.process_set is hvd.global_process_set

"""A parameter that several wrappers hold is reduced once, by the one that is used; two in use are refused."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.ways import Wrapped
from torch import nn

import hvlike
from hvlike import DistributedOptimizer
from hvlike.errors import UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

WAYS = ["optimizer", "ddp", "zero", "adasum"]
TWICE = r"The gradients of .* would be reduced twice: by this .*, and by a .* of the same parameters"


def check_four_steps(module: nn.Module, *ways: str) -> None:
    """All ranks are alike and, but for Adasum, what one process makes of the whole batches."""
    if "adasum" not in ways:
        expected = make_model()
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        for number in range(4):
            plain.zero_grad()
            loss_of(expected, whole_batch(number)).backward()
            plain.step()
        assert largest_difference(module.parameters(), expected.parameters()) < 1e-6
    assert same_on_all_ranks(module.parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("settings", [{}, {"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "256"}])
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_two_in_use_are_refused(
    hvd: ModuleType,
    restarted: Callable[[Mapping[str, str]], None],
    first: str,
    second: str,
    settings: dict[str, str],
) -> None:
    if first == second == "ddp":
        pytest.skip("modules share parameters")
    restarted(settings)
    module = make_model()
    one, other = Wrapped(first, module), Wrapped(second, module)
    one.step(hvd)
    with pytest.raises(UsageError, match=TWICE):
        other.step(hvd)
    if first == "optimizer":
        # It has seen that backward pass.
        one.optimizer.step()
    one.step(hvd, 1)
    # Nothing was lost, and the one that is left goes on.
    del one
    other.step(hvd, 2)
    other.step(hvd, 3)
    assert same_on_all_ranks(module.parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", [hvlike.Sum, hvlike.Average])
def test_one_backward_pass_for_two_optimizers(hvd: ModuleType, op: int) -> None:
    module = make_model()
    plain = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    first, second = (hvlike.DistributedOptimizer(each, module.named_parameters(), op=op) for each in plain)
    loss_of(module, share(hvd, whole_batch())).backward()
    first.step()
    with pytest.raises(UsageError, match=r"The gradients of '0\.weight', '0\.bias', .* \(6 in all\) would be reduced"):
        second.step()


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_around_a_wrapped_module(hvd: ModuleType) -> None:
    """The common mistake; the text says what to use."""
    model = DistributedDataParallel(make_model())
    optimizer = hvlike.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, share(hvd, whole_batch())).backward()
    with pytest.raises(UsageError, match="a plain optimizer with a DistributedDataParallel"):
        optimizer.step()


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_one_that_is_not_used_any_more(hvd: ModuleType, first: str, second: str) -> None:
    """A program wraps anew to resume, and keeps the old wrapper; before that the new one waits for its turn."""
    module = make_model()
    old, kept = Wrapped(first, module), Wrapped(second, module)
    old.step(hvd)
    del kept
    new = Wrapped(second, module)
    for number in range(1, 4):
        new.step(hvd, number)
    check_four_steps(module, first, second)
    del old


@pytest.mark.parametrize("settings", [{}, {"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "256"}])
def test_one_made_between_backward_and_step(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], settings: dict[str, str]
) -> None:
    restarted(settings)
    module, expected = make_model(), make_model()
    used = Wrapped("optimizer", module)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(3):
        used.optimizer.zero_grad()
        loss_of(module, share(hvd, whole_batch(number))).backward()
        unused = Wrapped("optimizer", module)
        used.optimizer.step()
        plain.zero_grad()
        loss_of(expected, whole_batch(number)).backward()
        plain.step()
    assert largest_difference(module.parameters(), expected.parameters()) < 1e-6
    del unused


def test_a_module_beside_an_optimizer_that_reduces_nothing(hvd: ModuleType) -> None:
    module, expected = make_model(), make_model()
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(3):
        for each, other, batch in (
            (optimizer, model, share(hvd, whole_batch(number))),
            (plain, expected, whole_batch(number)),
        ):
            each.zero_grad()
            loss_of(other, batch).backward()
            each.step()
    assert largest_difference(module.parameters(), expected.parameters()) < 1e-6


def test_optimizers_of_parts_that_train_in_turn(hvd: ModuleType) -> None:
    """Both were made for all parameters; each thaws its own part."""
    module = make_model()
    parts = [list(module.parameters())[:4], list(module.parameters())[4:]]
    optimizers = []
    for part in parts:
        module.requires_grad_(False)
        for parameter in part:
            parameter.requires_grad_(True)
        plain = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizers.append(hvlike.DistributedOptimizer(plain, module.named_parameters()))
    for number in range(4):
        module.requires_grad_(False)
        for parameter in parts[number % 2]:
            parameter.requires_grad_(True)
        module.zero_grad()
        loss_of(module, share(hvd, whole_batch(number))).backward()
        optimizers[number % 2].step()
        assert same_on_all_ranks(module.parameters())


@pytest.mark.mpi(min_size=2)
def test_two_sets_of_ranks(hvd: ModuleType) -> None:
    """Every rank makes both optimizers, and uses that of its set."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    module = make_model()
    optimizers = [
        hvlike.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), process_set=each) for each in sets
    ]
    for number in range(2):
        optimizers[hvd.rank()].zero_grad()
        loss_of(module, share(hvd, whole_batch(number))).backward()
        optimizers[hvd.rank()].step()
    for each in sets:
        hvd.remove_process_set(each)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_one_made_while_layers_are_frozen(hvd: ModuleType, first: str, second: str, everything: bool) -> None:
    """It takes them over, too: thawed later, they are its own, though the earlier wrapper is still there."""
    if everything and second == "ddp":
        pytest.skip("a DistributedDataParallel needs something to train")
    module = make_model()
    old = Wrapped(first, module)
    old.step(hvd)
    frozen = module if everything else module[2]
    frozen.requires_grad_(False)
    new = Wrapped(second, module)
    frozen.requires_grad_(True)
    for number in range(1, 4):
        new.step(hvd, number)
    check_four_steps(module, first, second)
    del old


def test_modules_that_share_one_frozen_layer(hvd: ModuleType) -> None:
    """The first forward's wrapper does not reduce again what the second has reduced at the end of backward."""
    results = []
    for distributed in (False, True):
        module = make_model()
        first: nn.Module = DistributedDataParallel(module) if distributed else module
        module[2].requires_grad_(False)
        second: nn.Module = DistributedDataParallel(module) if distributed else module
        module[2].requires_grad_(True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(3):
            batch = share(hvd, whole_batch(number)) if distributed else whole_batch(number)
            optimizer.zero_grad()
            (loss_of(first, batch) + loss_of(second, batch)).backward()
            optimizer.step()
        results.append(list(module.parameters()))
    assert largest_difference(*results) < 1e-6
    assert same_on_all_ranks(results[1])


def test_one_backward_pass_feeds_two_unnamed_optimizers(hvd: ModuleType) -> None:
    model = make_model()
    parameters = list(model.parameters())
    first = DistributedOptimizer(torch.optim.SGD(parameters[:2], lr=0.1))
    second = DistributedOptimizer(torch.optim.AdamW(parameters[2:], lr=0.01))
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        first.step()
        second.step()
    assert same_on_all_ranks(parameters)
    assert hvd.size() == 1 or first.gradients.reducers.name != second.gradients.reducers.name


def test_optimizers_made_in_another_order_on_each_rank(hvd: ModuleType) -> None:
    models = [make_model(seed) for seed in range(2)]
    order = [0, 1] if hvd.rank() % 2 == 0 else [1, 0]
    optimizers = {index: DistributedOptimizer(torch.optim.SGD(models[index].parameters(), lr=0.1)) for index in order}
    for index, model in enumerate(models):
        loss_of(model, share(hvd, whole_batch())).backward()
        optimizers[index].step()
    assert all(same_on_all_ranks(model.parameters()) for model in models)


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_is_told_by_what_it_wraps(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    generator, critic, third = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)
    before = set(hvd.statistics().waits)
    for model, kind, names in (
        (generator, torch.optim.Adamax, [("generator.weight", generator.weight), ("generator.bias", generator.bias)]),
        (critic, torch.optim.Adamax, [("critic.weight", critic.weight), ("critic.bias", critic.bias)]),
        (third, torch.optim.Rprop, None),
        (third, torch.optim.Rprop, None),
    ):
        step(hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), named_parameters=names), model)
    found = set(hvd.statistics().waits) - before
    assert {
        "DistributedOptimizer(Adamax, generator.weight)",
        "DistributedOptimizer(Adamax, critic.weight)",
        "DistributedOptimizer(Rprop)",
        "DistributedOptimizer(Rprop) #2",
    } <= found

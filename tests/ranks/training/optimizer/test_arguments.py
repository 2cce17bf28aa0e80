"""Wrong arguments of DistributedOptimizer are refused at once, with Horovod's words and more."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import make_model
from torch import nn

from hvlike.errors import UsageError
from hvlike.training.distributed_optimizer import DistributedOptimizer

Arguments = Callable[[nn.Module], dict[str, Any]]

REFUSED: dict[str, tuple[Arguments, str]] = {
    "items that are no tuples": (
        lambda model: {"named_parameters": list(model.parameters())},
        "named_parameters should be a sequence of tuples",
    ),
    "a mapping of names": (
        lambda model: {"named_parameters": dict(model.named_parameters())},
        "named_parameters should be a sequence of tuples .* Got dict",
    ),
    "duplicate names": (
        lambda model: {"named_parameters": [("a", parameter) for parameter in model.parameters()]},
        "Parameter names in named_parameters must be unique. Found duplicates: a",
    ),
    "unnamed parameters": (
        lambda model: {"named_parameters": list(model.named_parameters())[1:]},
        r"one or more model parameters were not named. Python object ids: \d+ \(shapes \[16, 6\]\)",
    ),
    "no passes": (lambda model: {"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, got 0"),
    "a fraction of a pass": (lambda model: {"backward_passes_per_step": 1.5}, "backward_passes_per_step must be > 0"),
    "a negative number of groups": (lambda model: {"groups": -1}, "groups should be a non-negative integer or a list"),
    "groups by name": (lambda model: {"groups": "all"}, "groups should be a non-negative integer or a list"),
    "groups of names": (lambda model: {"groups": [["0.weight"]]}, "groups must consist of torch.Tensor"),
    "flat groups": (lambda model: {"groups": list(model.parameters())}, "groups should be a non-negative integer"),
    "a parameter twice in groups": (
        lambda model: {"groups": [list(model.parameters()), list(model.parameters())[:1]]},
        "A parameter can only appear once in groups.",
    ),
    "Min": (lambda model: {"op": 3}, "op Min is not supported for gradients; expected Average, Sum or Adasum"),
    "no op": (lambda model: {"op": 99}, "op 99 is not a reduction"),
    "predivide with Sum": (
        lambda model: {"op": 1, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor not supported with op != Average",
    ),
    "predivide by zero": (lambda model: {"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be > 0"),
    "no compressor": (lambda model: {"compression": "fp16"}, r"compression must have the methods compress\(tensor\)"),
    "no process set": (lambda model: {"process_set": hash}, "ProcessSet"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(hvd: ModuleType, what: str) -> None:
    arguments, text = REFUSED[what]
    model = make_model()
    with pytest.raises(UsageError, match=text):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments(model))


def test_something_that_is_no_optimizer(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"expects a torch.optim.Optimizer, got Sequential"):
        DistributedOptimizer(make_model())


def test_wrapping_twice(hvd: ModuleType) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"is distributed already\. Wrap it once"):
        DistributedOptimizer(optimizer)


@pytest.mark.parametrize("groups", [None, 0, 1, 2, 100])
def test_any_number_of_groups(hvd: ModuleType, groups: int | None) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=groups)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def test_num_groups_is_the_older_name(hvd: ModuleType) -> None:
    model = make_model()
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`") as warned:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_groups=2)
    assert warned[0].filename == __file__
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def test_more_names_than_parameters_are_fine(hvd: ModuleType) -> None:
    model = make_model()
    DistributedOptimizer(torch.optim.SGD(list(model.parameters())[:2], lr=0.1), model.named_parameters())

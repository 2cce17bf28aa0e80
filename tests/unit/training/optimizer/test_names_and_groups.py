"""Names and groups of parameters, as pure functions."""

import pytest
import torch
from torch import nn

from hvlike.training.broadcast import find_differences
from hvlike.training.gradients.parameters import (
    check_groups,
    check_named_parameters,
    find_duplicates,
    group_indices,
    name_parameters,
)

A, B, C = (nn.Parameter(torch.zeros(size)) for size in (1, 2, 3))


@pytest.mark.parametrize(
    ("given", "torchs", "expected"),
    [
        ({}, {}, ["noname.0.0", "noname.0.1", "noname.1.0"]),
        ({A: "a", C: "c"}, {}, ["a", "noname.0.1", "c"]),
        ({}, {"param_names": ["x", "y"]}, ["x", "y", "noname.1.0"]),
        ({A: "a"}, {"param_names": ["x", "y"]}, ["a", "y", "noname.1.0"]),
        ({A: "y"}, {"param_names": ["x", "y"]}, ["y", "noname.0.1", "noname.1.0"]),
        ({A: "noname.0.1"}, {}, ["noname.0.1", "noname.0.1 of 0.1", "noname.1.0"]),
    ],
)
def test_names(given: dict, torchs: dict, expected: list[str]) -> None:
    names = name_parameters([{"params": [A, B], **torchs}, {"params": [C]}], given)
    assert [names[parameter] for parameter in (A, B, C)] == expected


def test_a_shared_parameter_keeps_its_first_name() -> None:
    assert check_named_parameters([("a", A), ("b", B), ("also a", A)]) == {A: "a", B: "b"}


def test_duplicates() -> None:
    assert find_duplicates(["b", "a", "b", "c", "a"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(None, None), (0, None), (3, 3), ([[A], [C, B]], [[0], [1]]), ([[C]], []), (([A], (B,)), [[0], [1]])],
)
def test_groups_in_terms_of_places(groups: object, expected: object) -> None:
    assert group_indices(check_groups(groups), [A, B]) == expected


@pytest.mark.parametrize(
    ("expected", "got", "texts"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["'a': expected 1, got 2"]),
        ({"a": 1}, {"b": 2}, ["'a' is missing", "'b' exists only here"]),
        ({str(n): 0 for n in range(9)}, {}, ["'0' is missing", "'1' is missing", "'2' is missing", "and 6 more"]),
    ],
)
def test_differences(expected: dict, got: dict, texts: list[str]) -> None:
    assert find_differences(expected, got) == texts

"""Names, groups and checksums of parameters and options: any tensor is looked at, and none is changed."""

import pytest
import torch
from support.training.strange_values import STRANGE, Raises, strange_options, strange_tensors
from torch import Tensor, nn

from hvlike.observe.looking import only_looks
from hvlike.training.broadcast import find_differences
from hvlike.training.gradients.checksums import checksum_of, is_plain, value_checksums
from hvlike.training.gradients.parameters import (
    check_groups,
    check_named_parameters,
    describe_options,
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


NOT_PLAIN = {"sparse", "csr", "quantized", "nested", "jagged", "meta"}


@pytest.mark.parametrize("kind", STRANGE)
def test_any_tensor(kind: str) -> None:
    one, other = strange_tensors()[kind], strange_tensors()[kind]
    assert is_plain(one) == (kind not in NOT_PLAIN)
    assert value_checksums([one]) == value_checksums([other])
    assert checksum_of(one) == checksum_of(other)
    if kind in NOT_PLAIN:
        assert value_checksums([one]) == (0,)
        assert checksum_of(one) == 0
    assert one._version == other._version


def test_all_together_as_alone() -> None:
    tensors = list(strange_tensors().values())
    assert value_checksums(tensors) == tuple(value_checksums([each])[0] for each in tensors)


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda tensor: tensor.conj().imag])
def test_views_that_are_not_what_their_memory_says(view: object) -> None:
    tensor = torch.complex(torch.ones(3), torch.arange(3.0))
    seen: Tensor = view(tensor)  # type: ignore[operator]
    plain = seen.resolve_conj().resolve_neg()
    assert value_checksums([seen]) == value_checksums([plain])
    assert checksum_of(seen) == checksum_of(plain)
    assert value_checksums([seen]) != value_checksums([tensor if seen.is_complex() else tensor.imag])


def test_a_tensor_of_its_own_class_is_read_if_it_has_memory() -> None:
    class Own(Tensor):
        pass

    assert value_checksums([torch.ones(2).as_subclass(Own)]) == value_checksums([torch.ones(2)])


def test_a_fake_tensor() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = torch.ones(2)
    assert value_checksums([fake]) == (0,)
    assert checksum_of(fake) == 0


def test_under_functional_transforms() -> None:
    def look(tensor: Tensor) -> Tensor:
        value_checksums([tensor])
        checksum_of(tensor)
        return tensor * 2

    assert torch.equal(torch.func.vmap(look)(torch.ones(3, 2)), torch.full((3, 2), 2.0))


def test_options() -> None:
    described = dict(describe_options([{"params": [], "lr": 0.1, **strange_options(), "flag": True, 5: 1}]))
    assert described["lr of parameter group 0"] == "0.1"
    assert described["flag of parameter group 0"] == "True"
    assert described["number of parameter group 0"] == "0.5"
    assert described["text of parameter group 0"] == "'a'"
    assert described["scalar of parameter group 0"] == "True"
    assert "raises of parameter group 0" not in described


def test_groups_that_are_none() -> None:
    assert describe_options([Raises()]) == ()  # type: ignore[list-item]


def test_what_only_looks_passes_on_what_ends_a_program() -> None:
    @only_looks(3)
    def look(error: BaseException) -> int:
        raise error

    assert look(ValueError()) == look(RecursionError()) == 3
    with pytest.raises(KeyboardInterrupt):
        look(KeyboardInterrupt())

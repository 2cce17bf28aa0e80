"""Parameters: names, groups, checksums, options, owners with ZeRO; any tensor is looked at, and none is changed."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training.strange_values import STRANGE, Raises, strange_options, strange_tensors
from torch import Tensor, nn

from hvlike.observe.looking import only_looks
from hvlike.training.broadcast import find_differences
from hvlike.training.gradients.aliases import first_sharers
from hvlike.training.gradients.checksums import checksum_of, is_plain, value_checksums
from hvlike.training.gradients.parameters import (
    check_groups,
    check_named_parameters,
    describe_options,
    find_duplicates,
    group_indices,
    name_parameters,
)
from hvlike.training.zero.exchange import Partition, assign_owners
from hvlike.training.zero.sharded_state import StateLock

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_four_sizes_of_torchs_test_give_every_rank_24_elements(ranks: int) -> None:
    sizes = [size for size in (9, 7, 5, 3) for _ in range(ranks)]
    (owners,) = assign_owners([sizes], ranks)
    assert [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)] == [
        24
    ] * ranks


@pytest.mark.parametrize(
    ("groups", "ranks", "expected"),
    [
        ([[9, 7, 5, 3]], 2, [[0, 1, 1, 0]]),
        ([[3, 5, 7, 9]], 2, [[0, 1, 1, 0]]),
        ([[4, 4, 4]], 3, [[0, 1, 2]]),
        ([[1]], 4, [[0]]),
        ([[9, 7], [3, 5]], 2, [[0, 1], [0, 1]]),
        ([[2, 2], []], 2, [[0, 1], []]),
    ],
)
def test_examples(groups: list[list[int]], ranks: int, expected: list[list[int]]) -> None:
    assert assign_owners(groups, ranks) == expected


SIZES = st.lists(st.integers(0, 1000), max_size=20)


@settings(max_examples=40)
@given(st.lists(SIZES, max_size=4), st.integers(1, 6))
def test_no_rank_holds_more_than_the_mean_and_one_largest(groups: list[list[int]], ranks: int) -> None:
    owners = assign_owners(groups, ranks)
    held = [0] * ranks
    for sizes, chosen in zip(groups, owners, strict=True):
        for size, owner in zip(sizes, chosen, strict=True):
            held[owner] += size
    largest = max((size for sizes in groups for size in sizes), default=0)
    assert max(held) - min(held) <= largest


@settings(max_examples=40)
@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 6))
def test_a_group_that_is_added_moves_nothing(groups: list[list[int]], ranks: int) -> None:
    assert assign_owners(groups, ranks)[:-1] == assign_owners(groups[:-1], ranks)


BASE = torch.zeros(12)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], []),
        ([torch.zeros(2), torch.zeros(2)], [0, 1]),
        ([BASE, BASE], [0, 0]),
        ([BASE[:4], BASE[4:8], BASE[8:]], [0, 1, 2]),
        ([BASE[:5], BASE[8:], BASE[4:8]], [0, 1, 0]),
        ([BASE[8:], BASE[4:9], torch.zeros(1), BASE[:5]], [0, 0, 2, 0]),
        ([BASE.view(3, 4)[:, 0], BASE.view(3, 4)[:, 1]], [0, 0]),
        ([BASE[:0], BASE[:0], torch.empty(0)], [0, 1, 2]),
        ([torch.zeros(1).expand(3), torch.empty(3, device="meta")], [0, 1]),
    ],
)
def test_first_sharers(tensors: list[Tensor], expected: list[int]) -> None:
    assert first_sharers(tensors) == expected


def test_one_owner() -> None:
    assert assign_owners([[9, 7, 5], [3, 2]], 2, [0, 1, 2, 0, 1]) == [[0, 1, 1], [0, 1]]
    partition = Partition([{"params": [BASE[:6], torch.zeros(6)]}, {"params": [BASE[3:9]]}], 3)
    assert partition.owners[0] == partition.owners[2]


def in_another_thread(changes: StateLock, *, wait: bool) -> bool:
    """Whether a copy may be made there."""
    found = []

    def look() -> None:
        with changes.copy(wait=wait) as allowed:
            found.append(allowed)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_no_copy_during_a_change() -> None:
    changes = StateLock()
    with changes.change():
        assert changes.under_way
        assert not in_another_thread(changes, wait=False)
        # Also who would wait for another copy does not wait for a change: it may be his own.
        assert not in_another_thread(changes, wait=True)
        with changes.copy(wait=True) as allowed:
            assert not allowed
    assert not changes.under_way
    assert in_another_thread(changes, wait=False)


def test_the_loop_does_not_wait_for_a_copy() -> None:
    changes = StateLock()
    with changes.copy(wait=True) as allowed:
        assert allowed
        assert not changes.under_way
        assert not in_another_thread(changes, wait=False)
    assert in_another_thread(changes, wait=True)


def test_a_change_that_fails_is_over() -> None:
    changes = StateLock()
    with pytest.raises(ZeroDivisionError), changes.change():
        raise ZeroDivisionError
    assert in_another_thread(changes, wait=False)

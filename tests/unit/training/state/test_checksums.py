"""Checksums look at any tensor: one that cannot be read has that of all such tensors, and none is changed."""

import pytest
import torch
from support.training.strange_values import STRANGE, Raises, strange_options, strange_tensors
from torch import Tensor

from hvlike.observe.looking import only_looks
from hvlike.training.gradients.checksums import checksum_of, is_plain, value_checksums
from hvlike.training.gradients.parameters import describe_options

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

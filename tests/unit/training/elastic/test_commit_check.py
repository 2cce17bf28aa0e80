"""What is said of parameters that differ between ranks, and what counts as a difference."""

import pytest
import torch
from torch import Tensor

from hvlike.training.elastic.commit_check import checksum_of, describe_difference


def test_the_first_parameter_that_differs_is_named_with_the_ranks_on_each_side() -> None:
    text = describe_difference(["model.a", "model.b", "model.c"], [(1, 2, 3), (1, 0xFF, 3), (1, 2, 4)])
    assert text == (
        "parameter model.b differs between ranks (checksums: 00000002 on ranks [0, 2], 000000ff on ranks [1]; "
        "2 of 3 parameters differ)"
    )


def test_other_numbers_of_parameters_are_a_difference() -> None:
    assert describe_difference(["a"], [(1,), (1, 2)]) == "ranks have different numbers of parameters: [1, 2]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_one_bit_anywhere_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, 3, dtype=dtype)
    changed = tensor.clone()
    changed[4, 2] = 1
    assert checksum_of(tensor) != checksum_of(changed)


@pytest.mark.parametrize("tensor", [torch.tensor(2.5), torch.empty(0), torch.arange(6.0).reshape(2, 3).t()])
def test_equal_values_have_equal_checksums_whatever_their_layout(tensor: Tensor) -> None:
    assert checksum_of(tensor) == checksum_of(tensor.clone(memory_format=torch.contiguous_format))
    assert checksum_of(tensor.requires_grad_()) == checksum_of(tensor.detach())


def test_tensors_without_plain_memory_are_left_out() -> None:
    assert checksum_of(torch.eye(2).to_sparse()) == checksum_of(torch.empty(3, device="meta")) == 0
    assert checksum_of(torch._to_functional_tensor(torch.ones(3))) == 0

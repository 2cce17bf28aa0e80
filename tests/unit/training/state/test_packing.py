"""Small tensors of an owner travel together, large ones alone; what comes back is where it belongs."""

import pytest
import torch

from hvlike.backends.fusion_buffer import SMALL_BYTES
from hvlike.training.gradients.planned_queue import Packing

pytestmark = pytest.mark.pure


def some_tensors() -> list[torch.Tensor]:
    large = torch.arange(SMALL_BYTES // 2, dtype=torch.float32).reshape(2, -1).t()
    return [torch.tensor(3), torch.ones(2, 3), large, torch.full((4,), 2.0), torch.empty(0)]


def test_small_tensors_of_one_owner_and_dtype_share_a_piece() -> None:
    tensors = some_tensors()
    packing = Packing(tensors, [0, 0, 1, 1, 0])
    operands = packing.pack(tensors)
    assert packing.owners == [0, 0, 1, 1]
    assert [operand.flat.numel() for operand in operands] == [1, 6, 4, SMALL_BYTES // 2]


@pytest.mark.parametrize("row_by_row", [False, True])
def test_what_a_rank_has_packed_can_be_unpacked_on_another(row_by_row: bool) -> None:
    tensors = some_tensors()
    received = [torch.zeros_like(tensor) for tensor in tensors]
    sender, receiver = (Packing(each, [0] * len(each), row_by_row=row_by_row) for each in (tensors, received))
    sent, into = sender.pack(tensors), receiver.pack(received)
    for source, target in zip(sent, into, strict=True):
        target.flat.copy_(source.flat)
    receiver.unpack(received, into, [0])
    assert all(map(torch.equal, received, tensors))


def test_pieces_of_other_owners_are_left_alone() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    packing = Packing(tensors, [0, 1])
    operands = packing.pack(tensors)
    for operand in operands:
        operand.flat.fill_(5)
    packing.unpack(tensors, operands, [1])
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [5, 5]]


def test_only_the_own_small_tensors_are_copied() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    packing = Packing(tensors, [0, 1])
    first, second = packing.pack(tensors)
    tensors[0].fill_(2)
    tensors[1].fill_(2)
    packing.pack(tensors, owner=1)
    assert first.flat.tolist() == [1, 1]
    assert second.flat.tolist() == [2, 2]


def test_other_shapes_and_dtypes_do_not_fit() -> None:
    packing = Packing([torch.ones(2)], [0])
    assert packing.fits([torch.zeros(2)])
    assert not packing.fits([torch.zeros(3)])
    assert not packing.fits([torch.zeros(2, dtype=torch.float64)])
    assert not packing.fits([])

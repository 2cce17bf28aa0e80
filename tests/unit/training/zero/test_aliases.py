"""Parameters that share memory are found, and have one owner."""

import pytest
import torch
from torch import Tensor

from hvlike.training.gradients.aliases import first_sharers
from hvlike.training.zero.exchange import Partition, assign_owners

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
    assert assign_owners([[9, 7, 5, 3]], 2) == [[0, 1, 1, 0]]
    assert assign_owners([[9, 7, 5], [3, 2]], 2, [0, 1, 2, 0, 1]) == [[0, 1, 1], [0, 1]]
    partition = Partition([{"params": [BASE[:6], torch.zeros(6)]}, {"params": [BASE[3:9]]}], 3)
    assert partition.owners[0] == partition.owners[2]

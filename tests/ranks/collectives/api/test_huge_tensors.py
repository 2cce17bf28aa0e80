"""Tensors of more than 2 GiB and more than 2^31 elements: MPI's counts end there, ours do not."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.differs_by_ranks(2)

ELEMENTS = 2**31 + 8
NEEDED_GIB = 16


def available_gib() -> float:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) / 2**20 if found else 0.0


@pytest.mark.in_turn(1, of=2)
def test_more_elements_than_a_c_int_can_count(hvd: ModuleType) -> None:
    if hvd.size() != 2:
        pytest.skip("takes several GiB a rank: runs at 2 ranks only")
    # The ranks must not differ in what they skip.
    gib = hvd.allreduce(torch.tensor(available_gib()), op=hvd.Min).item()
    if gib < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of memory, {gib:.1f} are available")
    mine = torch.zeros(ELEMENTS, dtype=torch.uint8)
    ends = [0, 1, 2**30, 2**31 - 1, 2**31, ELEMENTS - 1]
    mine[ends] = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8) * (hvd.rank() + 1)
    hvd.allreduce_(mine, op=hvd.Sum)
    assert mine[ends].tolist() == [3, 6, 9, 12, 15, 18]
    assert int(mine[2**31 - 2 : 2**31 + 2].sum()) == 12 + 15
    mine[ends] = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8) + 10 * hvd.rank()
    hvd.broadcast_(mine, root_rank=1)
    assert mine[ends].tolist() == [11, 12, 13, 14, 15, 16]
    assert mine.count_nonzero() == len(ends)

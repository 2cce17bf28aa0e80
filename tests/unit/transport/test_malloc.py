"""Large blocks to receive into are asked for in huge pages, small ones are left to malloc."""

import re
from pathlib import Path

import pytest
import torch

from hvlike.transport.memory.malloc import ALWAYS_MAPPED_BYTES, allocate_receive_buffer

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(address: int) -> bool:
    """Whether huge pages are wanted for the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_large_blocks_are_wanted_in_huge_pages() -> None:
    tensor = allocate_receive_buffer((ALWAYS_MAPPED_BYTES // 4 + 1024, 2), torch.float32)
    assert tensor.shape == (ALWAYS_MAPPED_BYTES // 4 + 1024, 2)
    assert advised(tensor.data_ptr() + tensor.nbytes // 2)
    # All of it can be written.
    assert tensor.fill_(1).sum(dtype=torch.float64) == tensor.numel()


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1 << 20,)], ids=str)
def test_small_blocks_are_ordinary_tensors(shape: tuple[int, ...]) -> None:
    tensor = allocate_receive_buffer(shape, torch.int16)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.int16)
    tensor.resize_(100)

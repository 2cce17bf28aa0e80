"""Tests of tensors on a GPU: skipped where there is none."""

from types import ModuleType

import pytest
import torch


@pytest.fixture
def device(hvd: ModuleType) -> torch.device:
    """The GPU of this rank: its local rank counts through those there are."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False here")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device

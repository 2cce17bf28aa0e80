"""Each local rank has a GPU of its own, or shares one in turn; without a GPU that is said."""

from types import ModuleType

import pytest
import torch

from hvlike.collectives.session.basics import device_index
from hvlike.errors import LaunchError, UsageError


@pytest.mark.pure
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0]), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])],
)
def test_gpus_are_dealt_in_turn(gpus: int, expected: list[int]) -> None:
    assert [device_index(local_rank, gpus) for local_rank in range(4)] == expected


def test_the_cpu_is_always_there(hvd: ModuleType) -> None:
    assert hvd.pin_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"kinds that this torch was built for, 'cuda', .*'cpu', got 'gpu'"):
        hvd.pin_device("gpu")


def test_the_gpu_of_the_local_rank_becomes_the_current_one(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = hvd.pin_device()
    assert device == torch.device("cuda", hvd.local_rank() % 2)
    assert chosen == [device]


def test_no_gpu_is_an_error_that_says_why(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LaunchError, match=rf"local rank {hvd.local_rank()} sees no GPU: torch .* without CUDA"):
        hvd.pin_device()
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with pytest.raises(LaunchError, match=r"built for CUDA 12.9, but finds no device. Check CUDA_VISIBLE_DEVICES"):
        hvd.pin_device()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(LaunchError, match=r"built for ROCm 7.0, but finds no device. Check HIP_VISIBLE_DEVICES"):
        hvd.pin_device()

"""The doctor times tensors of a device, too, and says which backend they take and why."""

import pytest
import torch
from ranks.backends.cuda.conftest import Late

import hvlike
from hvlike.doctor import job


@pytest.mark.mpi(min_size=2)
def test_the_backend_of_a_device_is_timed(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SIZES", (4 << 10, 64 << 10))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(hvlike, "pin_device", lambda: torch.device("cpu"))
    measured = job.measure_allreduce()
    assert (measured.device or "").startswith(f"{late.backend}: ")
    assert [(each.where, each.nbytes) for each in measured.timings[2:]] == [("GPU", 4 << 10), ("GPU", 64 << 10)]
    assert all(each.right for each in measured.timings)

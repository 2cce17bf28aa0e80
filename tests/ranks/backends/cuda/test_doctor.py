"""The doctor times the backend that tensors of a device take, and says which it is and why."""

import pytest
import torch
from ranks.backends.cuda.conftest import Late

from hvlike.doctor import job


@pytest.mark.mpi(min_size=2)
def test_the_backend_of_a_device_is_timed(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SIZES", (4 << 10, 64 << 10))
    measured = job.measure_ways([], torch.device("cpu"))
    (only,) = measured.timings
    assert only.way == job.TimedWay(late.backend, tuple(range(late.hvd.size())))
    assert late.backend in only.reason
    assert [row.nbytes for row in only.rows] == list(job.SIZES)
    assert all(row.right for row in only.rows)

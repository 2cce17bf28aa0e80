"""Lightning and accelerate as they are, with torch's own DDP: only the backend's name is hvlike."""

from importlib.util import find_spec

import pytest
from support.job import CHECKOUT, run_job

JOB = CHECKOUT / "tests" / "support" / "integrations" / "unmodified_job.py"
ARE_THERE = find_spec("lightning") is not None and find_spec("accelerate") is not None

pytestmark = [
    pytest.mark.in_turn(1, of=2),
    pytest.mark.timeout(200),
    pytest.mark.skipif(not ARE_THERE, reason="needs Lightning and accelerate: pip install hvlike[integrations]"),
]


def test_they_train_as_one_process_does() -> None:
    output = run_job(JOB, 2, timeout=150).check().stdout
    for name in ("accelerate", "Lightning"):
        assert f"{name} over hvlike on 2 ranks: well" in output

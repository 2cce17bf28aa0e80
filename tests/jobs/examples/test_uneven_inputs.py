"""examples/uneven_optimizer.py and examples/joinable_counter.py."""

import re

import pytest
from support.job import CHECKOUT, run_job

pytestmark = pytest.mark.timeout(300)


def test_ranks_with_different_numbers_of_batches_end_equal() -> None:
    output = run_job(CHECKOUT / "examples" / "uneven_optimizer.py", 2, args=["--epochs", "2"], timeout=140).check()
    counts, accuracy, apart = output.stdout.splitlines()
    assert counts == "batches in an epoch: rank 0: 15, rank 1: 30"
    assert re.fullmatch(r"test accuracy 0\.[89]\d\d", accuracy)
    assert apart == "largest difference between ranks: 0.0"


def test_the_counter_of_torchs_tutorial() -> None:
    output = run_job(CHECKOUT / "examples" / "joinable_counter.py", 2, timeout=140).check().stdout
    assert output.splitlines() == [
        "rank 0: 10 inputs processed before it joined, 11 inputs processed on all ranks",
        "rank 1: 11 inputs processed before it joined, 11 inputs processed on all ranks",
    ]

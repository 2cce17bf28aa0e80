"""examples/uneven_optimizer.py and examples/joinable_counter.py."""

import re
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)


def test_ranks_with_different_numbers_of_batches_end_equal(output_of: Callable[[str], str]) -> None:
    counts, accuracy, apart = output_of("uneven_optimizer").splitlines()
    assert counts == "batches in an epoch: rank 0: 15, rank 1: 30"
    assert re.fullmatch(r"test accuracy 0\.[89]\d\d", accuracy)
    assert apart == "largest difference between ranks: 0.0"


def test_the_counter_of_torchs_tutorial(output_of: Callable[[str], str]) -> None:
    assert output_of("joinable_counter").splitlines() == [
        "rank 0: 10 inputs processed before it joined, 11 inputs processed on all ranks",
        "rank 1: 11 inputs processed before it joined, 11 inputs processed on all ranks",
    ]

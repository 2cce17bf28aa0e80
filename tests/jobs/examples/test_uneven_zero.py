"""examples/uneven_zero.py: torch's tutorial, with 5 and 6 inputs on two ranks."""

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)


def test_every_rank_goes_on_updating_its_share(output_of: Callable[[str], str]) -> None:
    assert output_of("uneven_zero").splitlines() == [
        "Rank 0 has exhausted all 5 of its inputs! It owns 2 of 4 parameters and has updated them 6 times.",
        "Rank 1 has exhausted all 6 of its inputs! It owns 2 of 4 parameters and has updated them 6 times.",
        "largest difference between ranks: 0.0",
    ]

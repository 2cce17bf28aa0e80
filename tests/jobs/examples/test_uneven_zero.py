"""examples/uneven_zero.py: torch's tutorial, with 5 and 6 inputs on two ranks."""

import pytest
from support.job import CHECKOUT, run_job

pytestmark = pytest.mark.timeout(300)


def test_every_rank_goes_on_updating_its_share() -> None:
    output = run_job(CHECKOUT / "examples" / "uneven_zero.py", 2, timeout=140).check().stdout
    assert output.splitlines() == [
        "Rank 0 has exhausted all 5 of its inputs! It owns 2 of 4 parameters and has updated them 6 times.",
        "Rank 1 has exhausted all 6 of its inputs! It owns 2 of 4 parameters and has updated them 6 times.",
        "largest difference between ranks: 0.0",
    ]

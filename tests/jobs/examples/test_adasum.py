"""examples/adasum.py: it learns on a number of ranks that is no power of two, and all hold the same parameters."""

import re

import pytest
from support.job import CHECKOUT, run_job

pytestmark = pytest.mark.timeout(300)


def test_it_learns_on_three_ranks() -> None:
    output = run_job(CHECKOUT / "examples" / "adasum.py", 3, args=["--epochs", "3"], timeout=140).check().stdout
    accuracy = re.search(r"epoch 3: test accuracy ([\d.]+)\n", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85
    assert output.splitlines()[-1] == "largest difference between ranks: 0.0"

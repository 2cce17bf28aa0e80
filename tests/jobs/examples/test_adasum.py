"""examples/adasum.py: it learns on a number of ranks that is no power of two, and all hold the same parameters."""

import re
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)


def test_it_learns_on_three_ranks(output_of: Callable[[str], str]) -> None:
    output = output_of("adasum")
    accuracy = re.search(r"epoch 3: test accuracy ([\d.]+)\n", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85
    assert output.splitlines()[-1] == "largest difference between ranks: 0.0"

"""The shorter examples run on two ranks and print what they promise."""

import re
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)


def test_both_clipping_recipes_train_alike(output_of: Callable[[str], str]) -> None:
    output = output_of("clipping, helper")
    assert output == output_of("clipping, explicit")
    assert re.search(r"epoch 2: loss [\d.]+, clipped [1-9]\d* of 23 steps", output)


def test_one_rank_overflows_and_all_skip(output_of: Callable[[str], str]) -> None:
    output = output_of("mixed_precision")
    assert "scale 512" in output
    assert output.splitlines()[-1] == "largest difference between ranks: 0.0"


def test_the_benchmark_reports_rates(output_of: Callable[[str], str]) -> None:
    output = output_of("synthetic")
    assert "Iter #1:" in output
    assert re.search(r"Img/sec per CPU: [\d.]+ \+-[\d.]+\nTotal img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+\n", output)

"""The example of compressed gradients learns, sends less, and goes on from its checkpoint bit by bit."""

import re
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(600)


def said(output: str) -> dict[str, str]:
    return dict(re.findall(r"(.+): (.+)\n", output))


def test_power_sgd_learns_from_few_bytes_and_resumes(output_of: Callable[[str], str]) -> None:
    output_of("powersgd, stopped")
    resumed, whole = said(output_of("powersgd, resumed")), said(output_of("powersgd, whole"))
    assert float(whole["test accuracy"]) > 0.85
    assert float(whole["bytes of gradients / bytes sent"]) > 4
    assert resumed["checksum of the model"] == whole["checksum of the model"]


def test_top_k_learns_from_few_bytes(output_of: Callable[[str], str]) -> None:
    whole = said(output_of("topk"))
    assert float(whole["test accuracy"]) > 0.8
    assert float(whole["bytes of gradients / bytes sent"]) > 25

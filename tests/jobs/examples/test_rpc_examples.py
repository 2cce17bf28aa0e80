"""The examples of RPC train, and what they train together is what one process trains alone."""

import re
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)


def numbers(pattern: str, output: str) -> list[float]:
    """What the pattern's group finds, in order."""
    return [float(each) for each in re.findall(pattern, output)]


def test_the_parameter_server_trains_as_one_process_does(output_of: Callable[[str], str]) -> None:
    output = output_of("parameter_server")
    first, last = numbers(r"epoch \d+: loss ([\d.]+)", output)
    assert last < 0.2 < first
    assert numbers(r"test accuracy: ([\d.]+)", output)[0] > 0.85
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-5


def test_the_pipeline_trains_as_one_process_does(output_of: Callable[[str], str]) -> None:
    output = output_of("pipeline")
    first, last = numbers(r"epoch \d+: loss ([\d.]+)", output)
    assert last < first
    assert "stages: [3, 3, 4] layers" in output
    assert numbers(r"test accuracy: ([\d.]+)", output)[0] > 0.5
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-12


def test_the_poles_stand_longer_and_longer(output_of: Callable[[str], str]) -> None:
    output = output_of("reinforcement")
    before, after = numbers(r"episode \d+: ([\d.]+) of 100 steps upright", output)
    assert before < 35 < 50 < after
    assert "600 passes of the policy for 1200 questions" in output


def test_one_rank_owns_two_stages(output_of: Callable[[str], str]) -> None:
    output = output_of("pipeline, 1")
    assert "stages: [5, 5] layers" in output
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-12

"""The examples of distributed autograd learn, and what they learn is what one process learns alone."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


def numbers(pattern: str, output: str) -> list[float]:
    """What the pattern's group finds, in order."""
    return [float(each) for each in re.findall(pattern, output)]


def test_the_sum_on_another_rank(output_of: Callable[[str], str], folder: Path) -> None:
    output = output_of("remote_add")
    assert "rank 1 has added them" in output
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-6
    assert (folder / "graph.dot").read_text().startswith("digraph")


def test_two_stages_train_as_one_process_does(output_of: Callable[[str], str]) -> None:
    output = output_of("model_parallel")
    first, last = numbers(r"epoch \d+: loss ([\d.]+)", output)
    assert last < first / 2
    assert "stages on worker0 and worker1" in output
    assert numbers(r"test accuracy: ([\d.]+)", output)[0] > 0.8
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-10


def test_the_language_model_learns_to_foretell_letters(output_of: Callable[[str], str]) -> None:
    output = output_of("rnn")
    assert "the embedding is on rank 1, the LSTM on rank 0, the decoder on rank 2" in output
    before, after = numbers(r"test perplexity ([\d.]+)", output)
    assert after < 20 < 60 < before


@pytest.mark.in_turn(1, of=2)
def test_the_hybrid_of_four_ranks_trains_as_one_process_does(output_of: Callable[[str], str]) -> None:
    output = output_of("hybrid")
    losses = numbers(r"epoch \d+: loss ([\d.]+)", output)
    assert losses[-1] < 0.6 * losses[0]
    assert numbers(r"3 trainer\(s\), test accuracy: ([\d.]+)", output)[0] > 0.7
    assert numbers(r"largest difference between trainers: (.+)", output) == [0.0]
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-10

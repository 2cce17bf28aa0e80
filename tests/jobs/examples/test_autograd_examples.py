"""The examples of distributed autograd learn, and what they learn is what one process learns alone."""

import re
from pathlib import Path

import pytest
from support.job import CHECKOUT, run_job

pytestmark = pytest.mark.timeout(300)


def output_of(name: str, *args: str, ranks: int) -> str:
    """What an example prints."""
    output: str = run_job(CHECKOUT / "examples" / f"autograd_{name}.py", ranks, args=args, timeout=140).check().stdout
    return output


def numbers(pattern: str, output: str) -> list[float]:
    """What the pattern's group finds, in order."""
    return [float(each) for each in re.findall(pattern, output)]


def test_the_sum_on_another_rank(tmp_path: Path) -> None:
    output = output_of("remote_add", "--mode", "smart", "--draw", str(tmp_path / "graph.dot"), ranks=2)
    assert "rank 1 has added them" in output
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-6
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")


def test_two_stages_train_as_one_process_does() -> None:
    output = output_of("model_parallel", "--epochs", "2", "--mode", "fast", ranks=2)
    first, last = numbers(r"epoch \d+: loss ([\d.]+)", output)
    assert last < first / 2
    assert "stages on worker0 and worker1" in output
    assert numbers(r"test accuracy: ([\d.]+)", output)[0] > 0.8
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-10


def test_the_language_model_learns_to_foretell_letters() -> None:
    output = output_of("rnn", "--epochs", "1", ranks=3)
    assert "the embedding is on rank 1, the LSTM on rank 0, the decoder on rank 2" in output
    before, after = numbers(r"test perplexity ([\d.]+)", output)
    assert after < 20 < 60 < before


def test_the_hybrid_of_four_ranks_trains_as_one_process_does() -> None:
    output = output_of("hybrid", "--epochs", "3", ranks=4)
    losses = numbers(r"epoch \d+: loss ([\d.]+)", output)
    assert losses[-1] < 0.6 * losses[0]
    assert numbers(r"3 trainer\(s\), test accuracy: ([\d.]+)", output)[0] > 0.7
    assert numbers(r"largest difference between trainers: (.+)", output) == [0.0]
    assert numbers(r"largest difference to one process: (.+)", output)[0] < 1e-10

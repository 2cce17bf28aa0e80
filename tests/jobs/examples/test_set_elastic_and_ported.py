"""The examples of process sets, of elastic training and of a Horovod script run and print what they promise."""

import re
from pathlib import Path

import pytest
import torch
from support.job import CHECKOUT, run_job

EXAMPLES = CHECKOUT / "examples"

pytestmark = pytest.mark.timeout(300)


def output_of(name: str, ranks: int, *args: str) -> list[str]:
    """The lines an example prints."""
    return run_job(EXAMPLES / name, ranks, args=args, timeout=140).check().stdout.splitlines()


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_models_at_once(ranks: int) -> None:
    lines = output_of("process_sets.py", ranks, "--epochs", "3")
    accuracies = [re.fullmatch(r"\w+: \d rank\(s\), test accuracy ([\d.]+), the same on all: True", x) for x in lines]
    assert len(lines) == 2
    assert all(found and float(found[1]) > 0.8 for found in accuracies), lines
    assert lines[0].startswith("narrow: 2 rank(s)" if ranks == 3 else "narrow: 1 rank(s)")


def test_the_error_leaves_no_trace_in_the_result() -> None:
    calm = output_of("elastic.py", 2, "--epochs", "1")
    troubled = output_of("elastic.py", 2, "--epochs", "1", "--fail-at", "15")
    assert troubled[0] == "starting again from step 10"
    assert calm == troubled[1:]


RUNS = {
    "fp16 and join": ["--fp16-allreduce", "--uneven", "--base-lr", "0.03"],
    "local sums": ["--batches-per-allreduce", "2", "--base-lr", "0.015"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_horovod_script(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    lines = output_of("ported.py", 2, "--epochs", "3", "--save", str(file), *RUNS[kind])
    found = [re.fullmatch(r"Test set: Average loss: ([\d.]+), Accuracy: [\d.]+%", line) for line in lines]
    losses = [float(each[1]) for each in found if each is not None]
    assert len(losses) == 3
    # Guessing would stay at the logarithm of 10.
    assert losses[2] < losses[1] < losses[0] < 2.31
    assert losses[2] < 2.2
    assert "conv1.weight" in torch.load(file, weights_only=True)


def test_only_the_import_tells_the_ported_script_from_horovods() -> None:
    lines = [line for line in (EXAMPLES / "ported.py").read_text().splitlines()[1:] if "hvlike" in line]
    assert lines == ["import hvlike as hvd"]

"""The examples of process sets, of elastic training and of a Horovod script run and print what they promise."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.job import CHECKOUT

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_models_at_once(ranks: int, output_of: Callable[[str], str]) -> None:
    lines = output_of(f"process_sets, {ranks}").splitlines()
    accuracies = [re.fullmatch(r"\w+: \d rank\(s\), test accuracy ([\d.]+), the same on all: True", x) for x in lines]
    assert len(lines) == 2
    assert all(found and float(found[1]) > 0.8 for found in accuracies), lines
    assert lines[0].startswith("narrow: 2 rank(s)" if ranks == 3 else "narrow: 1 rank(s)")


def test_the_error_leaves_no_trace_in_the_result(output_of: Callable[[str], str]) -> None:
    calm, troubled = (output_of(f"elastic, {how}").splitlines() for how in ("calm", "troubled"))
    assert troubled[0] == "starting again from step 10"
    assert calm == troubled[1:]


@pytest.mark.parametrize("kind", ["join", "sums"])
def test_a_horovod_script(kind: str, output_of: Callable[[str], str], folder: Path) -> None:
    lines = output_of(f"ported, {kind}").splitlines()
    found = [re.fullmatch(r"Test set: Average loss: ([\d.]+), Accuracy: [\d.]+%", line) for line in lines]
    losses = [float(each[1]) for each in found if each is not None]
    assert len(losses) == 3
    # Guessing would stay at the logarithm of 10.
    assert losses[2] < losses[1] < losses[0] < 2.31
    assert losses[2] < 2.2
    assert "conv1.weight" in torch.load(folder / f"{kind}.pt", weights_only=True)


def test_only_the_import_tells_the_ported_script_from_horovods() -> None:
    lines = [line for line in (CHECKOUT / "examples" / "ported.py").read_text().splitlines()[1:] if "hvlike" in line]
    assert lines == ["import hvlike as hvd"]

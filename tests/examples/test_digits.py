"""examples/digits.py: it learns, writes what it says, and a resumed run ends where an uninterrupted one does."""

from pathlib import Path

import pytest
import torch
from job import CHECKOUT, run_job

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

DIGITS = CHECKOUT / "examples" / "digits.py"

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]


def train(output: Path, *args: str, ranks: int = 2) -> str:
    """Run the example with small settings; its standard output."""
    settings = ("--output", str(output), "--batch-size", "64", "--lr", "0.05", "--warmup-epochs", "1")
    return run_job(DIGITS, ranks, args=[*settings, *args], timeout=110).check().stdout


def test_it_learns_and_writes_a_checkpoint_and_a_plot(tmp_path: Path) -> None:
    output = train(tmp_path, "--epochs", "4")
    label, value = output.splitlines()[-1].rsplit(" ", 1)
    assert label == "test accuracy:"
    assert float(value) > 0.9
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "loss.png"]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "whole", "--epochs", "3")
    train(tmp_path / "parts", "--epochs", "3", "--stop-after", "1")
    train(tmp_path / "parts", "--epochs", "3", "--resume")
    whole = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    parts = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert whole["history"] == parts["history"]
    assert whole["scheduler"] == parts["scheduler"]
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, parts["model"][name]), name
    for index, state in whole["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], parts["optimizer"]["state"][index]["momentum_buffer"]), index

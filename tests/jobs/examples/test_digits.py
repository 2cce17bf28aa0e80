"""examples/digits.py: it learns, writes what it says, and a resumed run ends where an uninterrupted one does."""

from pathlib import Path

import pytest
import torch
from support.job import CHECKOUT, run_job

DIGITS = CHECKOUT / "examples" / "digits.py"

pytestmark = pytest.mark.timeout(300)


def train(output: Path, *args: str, **env: str) -> str:
    """Run four epochs of the example on two ranks; its standard output."""
    settings = ["--epochs", "4", "--batch-size", "64", "--lr", "0.05", "--warmup-epochs", "1"]
    return run_job(DIGITS, 2, args=["--output", str(output), *settings, *args], env=env, timeout=140).check().stdout


def test_it_learns_writes_its_files_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    # This one just as for everybody, nothing of it in tests/startup.
    output = train(tmp_path / "whole", HVLIKE_TEST_NOTHING_LATE="1")
    label, value = output.splitlines()[-1].rsplit(" ", 1)
    assert label == "test accuracy:"
    assert float(value) > 0.9
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint.pt", "loss.png"]

    train(tmp_path / "parts", "--stop-after", "2")
    train(tmp_path / "parts", "--resume")
    whole = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    parts = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert len(whole["history"]) == 4
    assert whole["history"] == parts["history"]
    assert whole["scheduler"] == parts["scheduler"]
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, parts["model"][name]), name
    for index, state in whole["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], parts["optimizer"]["state"][index]["momentum_buffer"]), index

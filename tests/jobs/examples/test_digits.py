"""examples/digits.py: it learns, writes what it says, and a resumed run ends where an uninterrupted one does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(600)


def test_it_learns_writes_its_files_and_resumes_with_the_same_bits(
    output_of: Callable[[str], str], folder: Path
) -> None:
    label, value = output_of("digits, whole").splitlines()[-1].rsplit(" ", 1)
    assert label == "test accuracy:"
    assert float(value) > 0.9
    assert (folder / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "whole").iterdir()) == ["checkpoint.pt", "loss.png"]

    output_of("digits, stopped")
    output_of("digits, resumed")
    whole = torch.load(folder / "whole" / "checkpoint.pt", weights_only=True)
    parts = torch.load(folder / "parts" / "checkpoint.pt", weights_only=True)
    assert len(whole["history"]) == 4
    assert whole["history"] == parts["history"]
    assert whole["scheduler"] == parts["scheduler"]
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, parts["model"][name]), name
    for index, state in whole["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], parts["optimizer"]["state"][index]["momentum_buffer"]), index

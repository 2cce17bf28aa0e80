"""The example of compressed gradients learns, sends less, and goes on from its checkpoint bit by bit."""

import re
from pathlib import Path

import pytest
from support.job import CHECKOUT, run_job

pytestmark = pytest.mark.timeout(400)


def run(folder: Path, *args: str) -> dict[str, str]:
    program = CHECKOUT / "examples" / "powersgd.py"
    output = run_job(program, 2, args=["--output", str(folder), *args], timeout=140).check().stdout
    return dict(re.findall(r"(.+): (.+)\n", output))


def test_power_sgd_learns_from_few_bytes_and_resumes(tmp_path: Path) -> None:
    options = ("--epochs", "4", "--warmup-epochs", "1", "--full-epochs", "0.5")
    whole = run(tmp_path, *options)
    assert float(whole["test accuracy"]) > 0.85
    assert float(whole["bytes of gradients / bytes sent"]) > 4
    run(tmp_path, *options, "--stop-after", "2")
    resumed = run(tmp_path, *options, "--resume")
    assert resumed["checksum of the model"] == whole["checksum of the model"]


def test_top_k_learns_from_few_bytes(tmp_path: Path) -> None:
    whole = run(tmp_path, "--compression", "topk", "--epochs", "4", "--warmup-epochs", "1")
    assert float(whole["test accuracy"]) > 0.8
    assert float(whole["bytes of gradients / bytes sent"]) > 25

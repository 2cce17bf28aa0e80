"""examples/distributed_checkpoint.py: three ranks save a training, two go on with it."""

from pathlib import Path

import pytest
from support.job import CHECKOUT, run_job

EXAMPLE = CHECKOUT / "examples" / "distributed_checkpoint.py"

pytestmark = [pytest.mark.in_turn(1, of=4), pytest.mark.timeout(200)]


def test_two_ranks_go_on_with_what_three_have_saved(tmp_path: Path) -> None:
    settings = ["--output", str(tmp_path), "--epochs", "1"]
    saved = run_job(EXAMPLE, 3, args=settings).check().stdout.split()
    loaded = run_job(EXAMPLE, 2, args=[*settings, "--resume"]).check().stdout.splitlines()
    assert loaded[:2] == ["saved after epoch 1 on 3 ranks, goes on on 2", f"test accuracy then: {saved[-1]}"]
    assert float(loaded[2].split()[-1]) > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0", "epoch-1"]

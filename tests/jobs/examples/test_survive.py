"""The example that kills one of its ranks: the others go on; with a spare as if nothing had happened."""

import re
from pathlib import Path

import pytest
from support.job import CHECKOUT, IS_OPEN_MPI, Job, run_job

pytestmark = pytest.mark.skipif(not IS_OPEN_MPI, reason="the launcher of MPICH ends a job when a rank is lost")
EXAMPLE = CHECKOUT / "examples" / "survive.py"


def survive(ranks: int, *arguments: str, spares: int = 0) -> Job:
    for name in ("sklearn", "matplotlib"):
        pytest.importorskip(name)
    args = ["--epochs", "1", "--batch-size", "64", *arguments]
    return run_job(EXAMPLE, ranks, args=args, env={"HVLIKE_SPARES": str(spares)}, flags=["--with-ft", "ulfm"])


def test_with_a_spare_nothing_tells_that_a_rank_was_lost_and_without_one_rank_less_goes_on(tmp_path: Path) -> None:
    picture = tmp_path / "survive.png"
    calm = survive(2).stdout.splitlines()
    spare = survive(3, "--die-at", "7", "--commit-every", "5", spares=1).stdout.splitlines()
    shrunk = survive(2, "--die-at", "7", "--commit-every", "5", "--output", str(picture)).stdout.splitlines()
    assert spare == ["a rank was lost: 2 ranks went on from step 5", *calm]
    assert shrunk[0] == "a rank was lost: 1 ranks went on from step 5"
    assert re.fullmatch(r"\d+ steps, last loss \d\.\d+", shrunk[1]), shrunk
    assert picture.read_bytes().startswith(b"\x89PNG")

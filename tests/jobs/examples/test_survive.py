"""The example that kills one of its ranks: the others go on, with a rank less or with a spare."""

import re
from pathlib import Path

import pytest
from support.job import CHECKOUT, IS_OPEN_MPI, run_job

pytestmark = [
    pytest.mark.skipif(not IS_OPEN_MPI, reason="the launcher of MPICH ends a job when a rank is lost"),
    pytest.mark.timeout(300),
]
EXAMPLE = CHECKOUT / "examples" / "survive.py"


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("spares", "left"), [(0, 1), (1, 2)], ids=["shrink", "spare"])
def test_the_others_go_on_from_their_last_commit_and_the_moment_is_marked(
    spares: int, left: int, tmp_path: Path
) -> None:
    for name in ("sklearn", "matplotlib"):
        pytest.importorskip(name)
    picture = tmp_path / "survive.png"
    args = ["--epochs", "1", "--batch-size", "64", "--commit-every", "5", "--die-at", "7", "--output"]
    env = {"HVLIKE_SPARES": str(spares)}
    job = run_job(EXAMPLE, 2 + spares, args=[*args, str(picture)], env=env, flags=["--with-ft", "ulfm"])
    lines = job.stdout.splitlines()
    assert lines[0] == f"a rank was lost: {left} ranks went on from step 5", job.describe()
    assert re.fullmatch(r"\d+ steps, last loss \d\.\d+", lines[1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not job.survivors

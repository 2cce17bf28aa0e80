"""scripts/bench simulate, as a user starts it: it measures its constants on two ranks of this machine."""

import json
import subprocess

from support.job import CHECKOUT, job_environment

BENCH = CHECKOUT / "scripts" / "bench"


def test_all_constants_are_measured() -> None:
    line = [str(BENCH), "simulate", "--ranks", "1,64", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, env=job_environment({}))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    constants = found["constants"]
    for name in ("overhead", "gap", "fold", "memory_floor", "take", "tell", "entry_bytes"):
        assert constants[name] > 0, name
    assert found["network_measured"]
    assert [each["ranks"] for each in found["results"]] == [1, 64]

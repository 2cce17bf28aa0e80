"""scripts/bench scaling, as a user starts it: jobs of several sizes, counted exactly."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support.job import CHECKOUT, job_environment

BENCH = CHECKOUT / "scripts" / "bench"


def scaling(*arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    line = [str(BENCH), "scaling", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=100, check=False, env=job_environment(env or {})
    )


def test_planned_steps_send_no_control_message_and_negotiated_ones_do() -> None:
    done = scaling("--ranks", "1,3", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["ranks"] for each in found["results"]] == [1, 3]
    for each in found["results"]:
        planned, negotiated = each["ways"]["planned"], each["ways"]["negotiated"]
        # A rank that waits for half a second says so, and a busy machine may be so slow.
        assert set(planned["kinds"]) <= {"waiting", "resumed"}
        assert ("responses" in negotiated["kinds"]) == (each["ranks"] > 1)
        assert planned["data_messages"] == planned["collectives"] == 0


def test_nodes_can_be_emulated() -> None:
    done = scaling("--ranks", "2", "--steps", "2", "--ranks-per-node", "1", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["nodes"] == 2
    planned = result["ways"]["planned"]
    assert planned["data_messages"] + planned["collectives"] > 0


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    inside = scaling(env={"PMI_SIZE": "2"})
    assert inside.returncode == 2
    assert "without mpirun" in inside.stderr
    failing = scaling("--ranks", "1", "--steps", "2", env={"HVLIKE_OVERLAP": "perhaps"})
    assert failing.returncode == 1
    assert "HVLIKE_OVERLAP" in failing.stderr
    late = scaling("--ranks", "1", "--steps", "100000", "--timeout", "1")
    assert late.returncode == 1
    assert "has not ended within 1 s" in late.stderr

"""HVLIKE_TIMELINE: the files of a whole job are valid when it ends, and also when it is killed in the middle."""

import json
from pathlib import Path
from typing import Any

from support.job import run_job, start_job

from hvlike.observe.recorder import path_of_rank

STEPS = """
import torch
import hvlike as hvd

hvd.init()
for step in range(20):
    hvd.allreduce(torch.ones(1000), name=f"step{step}")
"""

KILLED = """
import os
import signal
import sys
import time
import torch
import hvlike as hvd

hvd.init()
end = time.monotonic() + float(sys.argv[1])
turns = 0
while True:
    hvd.grouped_allreduce([torch.ones(10)] * 5, name="often")
    turns += 1
    if hvd.rank() == 1 and turns > 100 and time.monotonic() > end:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def events(path: Path, rank: int) -> list[dict[str, Any]]:
    trace: dict[str, Any] = json.loads(Path(path_of_rank(str(path), rank)).read_text())
    assert trace["otherData"]["rank"] == rank
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


def test_every_rank_leaves_a_file_with_all_it_did(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    run_job(STEPS, 3, env={"HVLIKE_TIMELINE": str(path)}).check()
    clocks = set()
    for rank in range(3):
        found = events(path, rank)
        begun = [event["name"] for event in found if event["ph"] == "B" and event["tid"] != 0]
        assert begun.count("NEGOTIATE_ALLREDUCE") == 20
        assert sum(event["ph"] == "B" for event in found) == sum(event["ph"] == "E" for event in found)
        assert all(0 < event["ts"] < 60e6 for event in found if "ts" in event)
        clocks.add(json.loads(Path(path_of_rank(str(path), rank)).read_text())["otherData"]["clock_offset_ns"])
    assert len(clocks) == 1


def test_without_a_word_or_with_dynamic_there_is_no_file(tmp_path: Path) -> None:
    dynamic = "hvd.shutdown()\nos.environ['HOROVOD_TIMELINE'] = 'DYNAMIC'"
    run_job(f"import os\nos.chdir({str(tmp_path)!r})\n{STEPS}\n{dynamic}\n{STEPS}", 2).check()
    assert not list(tmp_path.iterdir())


def test_a_job_that_is_killed_leaves_valid_files(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with start_job(KILLED, 2, env={"HVLIKE_TIMELINE": str(path)}, args=["0.5"]) as running:
        job = running.wait()
    assert job.returncode
    assert not job.timed_out
    for rank in range(2):
        assert len(events(path, rank)) > 50


def test_the_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    run_job(STEPS, 2, env={"HOROVOD_TIMELINE": str(path), "HVLIKE_TIMELINE_MAX_BYTES": "4096"}).check()
    for rank in range(2):
        assert Path(path_of_rank(str(path), rank)).stat().st_size < 4096 + 200
        assert events(path, rank)[-1]["name"] == "TIMELINE_FULL"


def test_a_file_that_one_rank_cannot_write_is_refused_by_all(tmp_path: Path) -> None:
    (tmp_path / "t.rank1.json").mkdir()
    job = run_job(STEPS, 2, env={"HVLIKE_TIMELINE": str(tmp_path / "t.json")})
    assert job.returncode
    assert not job.timed_out
    assert "rank 1: timeline: the file" in job.stderr
    assert "cannot be written: Is a directory" in job.stderr

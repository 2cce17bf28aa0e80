"""HVLIKE_TIMELINE: the files of a whole job are valid when it ends, and also when it is killed in the middle."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.job import Job, run_job, start_job

from hvlike.observe.recorder import path_of_rank

pytestmark = pytest.mark.together

# Starts one after the other; the last one ends with the program.
STARTS = """
import json, os, sys
import torch
import hvlike as hvd

for settings in json.loads(sys.argv[1]):
    os.environ.update(settings)
    try:
        hvd.init()
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
        del os.environ["HVLIKE_TIMELINE"]
        continue
    for step in range(20):
        hvd.allreduce(torch.ones(1000), name=f"step{step}")
    if settings.get("HVLIKE_TIMELINE") != sys.argv[2]:
        hvd.shutdown()
    for name in settings:
        del os.environ[name]
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timelines")


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    """Three ranks that start five times. One of them cannot write its file of the first time."""
    (folder / "refused.rank1.json").mkdir()
    (folder / "none").mkdir()
    full = str(folder / "full.json")
    settings: list[dict[str, str]] = [
        {"HVLIKE_TIMELINE": str(folder / "refused.json")},
        {},
        {"HOROVOD_TIMELINE": "DYNAMIC"},
        {"HOROVOD_TIMELINE": str(folder / "limited.json"), "HVLIKE_TIMELINE_MAX_BYTES": "4096"},
        {"HVLIKE_TIMELINE": full},
    ]
    program = f"import os\nos.chdir({str(folder / 'none')!r})\n{STARTS}"
    return run_job(program, 3, args=[json.dumps(settings), full]).check()


def test_every_rank_leaves_a_file_with_all_it_did(job: Job, folder: Path) -> None:
    path = folder / "full.json"
    clocks = set()
    for rank in range(3):
        found = events(path, rank)
        begun = [event["name"] for event in found if event["ph"] == "B" and event["tid"] != 0]
        assert begun.count("NEGOTIATE_ALLREDUCE") == 20
        assert sum(event["ph"] == "B" for event in found) == sum(event["ph"] == "E" for event in found)
        assert all(0 < event["ts"] < 60e6 for event in found if "ts" in event)
        clocks.add(json.loads(Path(path_of_rank(str(path), rank)).read_text())["otherData"]["clock_offset_ns"])
    assert len(clocks) == 1


def test_without_a_word_or_with_dynamic_there_is_no_file(job: Job, folder: Path) -> None:
    assert not list((folder / "none").iterdir())
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"refused", "none", "limited", "full"}


def test_a_job_that_is_killed_leaves_valid_files(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with start_job(KILLED, 2, env={"HVLIKE_TIMELINE": str(path)}, args=["0.5"]) as running:
        job = running.wait()
    assert job.returncode
    assert not job.timed_out
    for rank in range(2):
        assert len(events(path, rank)) > 50


FAILS = """
import sys
import torch
import hvlike as hvd

hvd.init()
for turn in range(50):
    hvd.allreduce(torch.ones(10), name="often")
handles = [hvd.allreduce_async(torch.ones(10), name=f"the last of {hvd.rank()}")]
if hvd.rank() == 1:
    raise ValueError("boom")
hvd.synchronize(handles[0])
"""


def test_a_rank_that_fails_writes_what_it_did_last(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    job = run_job(FAILS, 2, env={"HVLIKE_TIMELINE": str(path)})
    assert "ValueError: boom" in job.stderr, job.describe()
    assert "the last of 1" in Path(path_of_rank(str(path), 1)).read_text()
    assert events(path, 1)


def test_the_size_is_limited(job: Job, folder: Path) -> None:
    path = folder / "limited.json"
    for rank in range(3):
        assert Path(path_of_rank(str(path), rank)).stat().st_size < 4096 + 200
        assert events(path, rank)[-1]["name"] == "TIMELINE_FULL"


def test_a_file_that_one_rank_cannot_write_is_refused_by_all(job: Job) -> None:
    (refused,) = {line for line in job.stderr.splitlines() if "rank 1: timeline: the file" in line}
    assert job.stderr.count(refused) == 3
    assert "cannot be written: Is a directory" in refused

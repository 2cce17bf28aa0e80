"""A rank with nothing in flight costs nothing, and leaves nothing behind."""

import os
from pathlib import Path

import pytest
from job import run_job

pytestmark = pytest.mark.job

# While the main thread sleeps only hvlike's own thread can use the processor.
PROGRAM = """
import resource, threading, time
import torch
import hvlike as hvd

def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

before = threading.active_count()
hvd.init()
hvd.allreduce(torch.ones(300_000), op=hvd.Sum)
leaf = torch.ones(3, requires_grad=True)
hvd.allreduce(leaf).sum().backward()
WAITING
time.sleep(1)
start = used()
time.sleep(3)
share = (used() - start) / 3
print(f"{share:.4f}", flush=True)
hvd.shutdown()
names = [thread.name for thread in threading.enumerate() if "hvlike" in thread.name]
assert not names, names
"""


def shares(waiting: str) -> list[float]:
    """The share of a core that each rank uses."""
    before = shared_files()
    job = run_job(PROGRAM.replace("WAITING", waiting), 2).check()
    assert shared_files() <= before
    return [float(line) for line in job.stdout.split()]


def shared_files() -> set[str]:
    """Names in /dev/shm that may be ours."""
    folder = Path("/dev/shm")
    return {name for name in os.listdir(folder) if "hvlike" in name} if folder.is_dir() else set()


def test_an_idle_rank_uses_less_than_one_percent_of_a_core() -> None:
    found = shares("")
    assert len(found) == 2
    assert max(found) < 0.01


def test_a_rank_that_waits_uses_less_than_one_percent_of_a_core() -> None:
    # One rank asks, the other is busy elsewhere: both sleep until it comes.
    found = shares(
        "late = [hvd.allreduce_async(torch.ones(9), name='late')] if hvd.rank() == 0 else []\n"
        "threading.Timer(4.5, lambda: late or late.append(hvd.allreduce_async(torch.ones(9), name='late'))).start()"
    )
    assert len(found) == 2
    assert max(found) < 0.01

"""A call of torch.distributed whose peer never comes ends in its time, with the names of those that are missing."""

import re
from pathlib import Path

import pytest
from support.job import IS_OPEN_MPI, run_job

pytestmark = pytest.mark.in_turn(2)

START = """
import os, signal, sys, threading, time
from datetime import timedelta
import hvlike  # Registers the backend where it is on the path and not installed.
import torch
import torch.distributed as dist

def say(*words):
    # In one piece: ranks write to the same pipe.
    os.write(1, (" ".join(map(str, (f"rank {rank}:", *words))).replace(chr(10), " ") + chr(10)).encode())

def error_of(call):
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{time.monotonic() - start:.1f} s {type(error).__name__} {isinstance(error, RuntimeError)} {error}"
    return "no error"

"""

NEVER_COMES = """
dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
calls = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3), group=group),
    "asynchronous": lambda: dist.broadcast(torch.ones(3), 1, group=group, async_op=True).wait(),
    "future": lambda: dist.all_gather(rows, torch.ones(1), group=group, async_op=True).get_future().wait(),
    "barrier": lambda: dist.barrier(group),
    "objects": lambda: dist.all_gather_object([None] * size, rank, group=group),
    "message": lambda: dist.recv(torch.ones(1), 1, group=group),
    "new_group": lambda: dist.new_group(timeout=timedelta(seconds=1), use_local_synchronization=True),
}
rows = [torch.ones(1) for _ in range(size)]
for name, call in calls.items():
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(1), group=group)
    if rank != 1:
        say(name + ":", error_of(call))
group = dist.new_group()
if rank != 1:
    say("own timeout:", error_of(lambda: dist.barrier(group, timeout=timedelta(seconds=1))))
dist.barrier()
"""
DEFAULT = """
dist.init_process_group("hvlike", timeout=timedelta(seconds=1))
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
began = time.monotonic()
if rank != 1:
    say("default:", error_of(lambda: dist.all_reduce(torch.ones(3))))
    say("default again:", error_of(lambda: dist.all_reduce(torch.ones(3))))
time.sleep(began + 4 - time.monotonic())
os._exit(0)
"""

FILES = "OMPI_MCA_btl_sm_backing_directory"
"""Where Open MPI keeps files that a rank which ends by os._exit or SIGKILL leaves behind: not in /dev/shm here."""


@pytest.mark.parametrize(("program", "calls"), [(NEVER_COMES, 8), (DEFAULT, 2)], ids=["groups", "default group"])
def test_a_call_ends_in_time_and_names_who_is_missing(program: str, calls: int, tmp_path: Path) -> None:
    job = run_job(START + program, 3, env={FILES: str(tmp_path)}, timeout=60)
    said = re.findall(r"rank ([02]): ([\w ]+): ([\d.]+) s \w+ (\w+) (.*)", job.stdout)
    assert len(said) == 2 * calls, job.describe()
    for _, name, seconds, is_runtime_error, words in said:
        assert float(seconds) < 3.5, job.describe()
        assert float(seconds) > 0.7 or name == "default again", job.describe()
        assert is_runtime_error == "True", job.describe()
        assert re.search(r"\brank 1\b", words), job.describe()


WAITS = """
dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group() for _ in range(3)]
dist.barrier()
if rank == 1:
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
works = {
    "all_reduce": dist.all_reduce(torch.ones(1_000_000), async_op=True),
    "all_gather": dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(2), group=groups[0], async_op=True),
    "barrier": dist.barrier(group=groups[1], async_op=True),
    "behind": dist.all_reduce(torch.ones(3), async_op=True),
}
futures = {name: work.get_future() for name, work in works.items()}
in_thread = []
waits = lambda: dist.all_reduce(torch.ones(2), group=groups[2])
thread = threading.Thread(target=lambda: in_thread.append(error_of(waits)))
thread.start()
for name, work in works.items():
    say("work", name, error_of(work.wait))
for name, future in futures.items():
    say("future", name, error_of(future.wait))
thread.join()
say("thread", "one", in_thread[0])
say("later", "one", error_of(lambda: dist.all_reduce(torch.ones(2))))
# The launcher may end the others when the first one ends.
time.sleep(4)
os._exit(0)
"""


def test_every_pending_wait_raises_when_a_rank_dies(tmp_path: Path) -> None:
    """Here the launcher lets the others live; without that flag it ends them at once."""
    if not IS_OPEN_MPI:
        pytest.skip("a flag of Open MPI's mpirun")
    job = run_job(START + WAITS, 3, env={FILES: str(tmp_path)}, flags=["--enable-recovery"], timeout=60)
    for rank in (0, 2):
        said = re.findall(rf"rank {rank}: (\w+) (\w+) ([\d.]+) s (\w+) True (.*)", job.stdout)
        assert len(said) == 10, job.describe()
        assert all(float(seconds) < 20 for _, _, seconds, _, _ in said), job.describe()
        assert all("rank 1" in words for *_, words in said), job.describe()


def test_the_job_ends_when_a_rank_dies(tmp_path: Path) -> None:
    job = run_job(START + WAITS, 3, env={FILES: str(tmp_path)}, timeout=60)
    assert job.returncode != 0
    assert job.seconds < 30
    assert not job.survivors, job.describe()


ENDS = {
    "without a destroy": "",
    "destroyed by one rank only": "if rank == 0: dist.destroy_process_group()",
    "with work in flight": "work = dist.all_reduce(torch.ones(100), async_op=True)",
    "destroyed twice": "dist.destroy_process_group(); dist.init_process_group('hvlike'); dist.destroy_process_group()",
    "groups after the default one": "group = dist.new_group(); dist.destroy_process_group(); del group",
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("end", ENDS)
def test_programs_end_in_any_order(end: str) -> None:
    program = START + "dist.init_process_group('hvlike')\nrank = dist.get_rank()\n"
    program += f"dist.all_reduce(torch.ones(1))\n{ENDS[end]}\nprint('end')\n"
    job = run_job(program, 2, timeout=60).check()
    assert job.stdout.count("end") == 2
    assert "Traceback" not in job.stderr, job.describe()

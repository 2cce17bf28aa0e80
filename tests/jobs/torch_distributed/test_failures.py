"""A call of torch.distributed whose peer never comes ends in its time, with the names of those that are missing."""

import re

import pytest
from support.job import IS_OPEN_MPI, run_job

START = """
import os, signal, sys, threading, time
from datetime import timedelta
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
dist.init_process_group("hvlike", timeout=timedelta(seconds=INIT))
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group(timeout=timedelta(seconds=GROUP))
dist.all_reduce(torch.ones(1), group=group)
if rank == 1:
    time.sleep(8)
else:
    say(error_of(lambda: CALL))
os._exit(0)
"""

CALLS = {
    "all_reduce": "dist.all_reduce(torch.ones(3))",
    "all_reduce in a group": "dist.all_reduce(torch.ones(3), group=group)",
    "asynchronous": "dist.all_reduce(torch.ones(3), async_op=True).wait()",
    "future": "dist.all_gather([torch.ones(1)] * size, torch.ones(1), async_op=True).get_future().wait()",
    "barrier": "dist.barrier()",
    "barrier with its own timeout": "dist.barrier(timeout=timedelta(seconds=2))",
    "objects": "dist.all_gather_object([None] * size, rank)",
    "new_group": "dist.new_group(timeout=timedelta(seconds=2))",
}


def seconds_of(call: str) -> tuple[float, float]:
    """The timeouts of the default group and of the other one: 2 s where the call is."""
    if call in ("all_reduce in a group", "barrier with its own timeout", "new_group"):
        return 60, 2
    return 2, 60


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_in_time_and_names_who_is_missing(call: str) -> None:
    default, group = seconds_of(call)
    program = START + NEVER_COMES.replace("INIT", str(default)).replace("GROUP", str(group)).replace(
        "CALL", CALLS[call]
    )
    job = run_job(program, 3, timeout=40)
    said = dict(re.findall(r"rank (\d): (.*)", job.stdout))
    assert sorted(said) == ["0", "2"], job.describe()
    for text in said.values():
        seconds, _, words = text.partition(" s ")
        assert 1.5 < float(seconds) < 5.5, job.describe()
        assert re.search(r"\brank 1\b|\branks \[?1\b|[Mm]issing.* 1\b", words), job.describe()
        assert " True " in words, job.describe()


WAITS = """
dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group() for _ in range(3)]
dist.barrier()
if rank == 1:
    time.sleep(1.0)
    LEAVE
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
os._exit(0)
"""


@pytest.mark.parametrize("leave", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_every_pending_wait_raises_when_a_rank_dies(leave: str) -> None:
    """Here the launcher lets the others live; without that flag it ends them at once."""
    if not IS_OPEN_MPI:
        pytest.skip("a flag of Open MPI's mpirun")
    job = run_job(START + WAITS.replace("LEAVE", leave), 3, flags=["--enable-recovery"], timeout=60)
    for rank in (0, 2):
        said = re.findall(rf"rank {rank}: (\w+) (\w+) ([\d.]+) s (\w+) True (.*)", job.stdout)
        assert len(said) == 10, job.describe()
        assert all(float(seconds) < 20 for _, _, seconds, _, _ in said), job.describe()
        assert all("rank 1" in words for *_, words in said), job.describe()


def test_the_job_ends_when_a_rank_dies() -> None:
    job = run_job(START + WAITS.replace("LEAVE", "os.kill(os.getpid(), signal.SIGKILL)"), 3, timeout=60)
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


@pytest.mark.parametrize("end", ENDS)
def test_programs_end_in_any_order(end: str) -> None:
    program = START + "dist.init_process_group('hvlike')\nrank = dist.get_rank()\n"
    program += f"dist.all_reduce(torch.ones(1))\n{ENDS[end]}\nprint('end')\n"
    job = run_job(program, 3, timeout=60).check()
    assert job.stdout.count("end") == 3
    assert "Traceback" not in job.stderr, job.describe()

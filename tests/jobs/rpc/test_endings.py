"""Workers that are silent, that leave, that are killed: callers hear of it by name in time, and nothing hangs."""

import pytest
from support.job import IS_OPEN_MPI, Job, run_job

pytestmark = pytest.mark.together

PREAMBLE = """
import os, signal, sys, threading, time
import torch
import hvlike as hvd
from hvlike import rpc

hvd.init()
rank = hvd.rank()

def begin():
    rpc.init_rpc(f"worker{rank}")

def error_of(action):
    start = time.monotonic()
    try:
        action()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no error")

def say(text):
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"rank {rank}: {text}\\n")
    sys.stdout.flush()

def stop(pid):
    # A signal takes effect some time: until then the worker serves.
    os.kill(pid, signal.SIGSTOP)
    tasks = f"/proc/{pid}/task"
    while any(") T " not in open(f"{tasks}/{each}/stat").read() for each in os.listdir(tasks)):
        time.sleep(0.01)

done = threading.Event()
begin()
"""

# Sessions one after the other; each begins with the workers of PREAMBLE, and the next one begins them anew.

SILENT = """
if rank == 0:
    pid = rpc.rpc_sync(1, os.getpid)
    reference = rpc.remote(1, torch.ones, (3,))
    assert reference.to_here().sum() == 3
    stop(pid)
    for action in (
        lambda: rpc.rpc_sync(1, os.getpid, timeout=0.3),
        lambda: rpc.rpc_async(1, os.getpid, timeout=0.3).wait(),
        lambda: reference.to_here(timeout=0.3),
        lambda: reference.rpc_sync(timeout=0.3).sum(),
        lambda: rpc.rpc_sync(1, torch.sum, (torch.ones(3 << 20),), timeout=0.3),
    ):
        text, seconds = error_of(action)
        assert "RPC ran for more than" in text and "worker1 (rank 1)" in text, text
        assert seconds >= 0.29, seconds
    # Others are not concerned.
    assert rpc.rpc_sync(2, torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    os.kill(pid, signal.SIGCONT)
    assert rpc.rpc_sync(1, os.getpid) == pid
    assert reference.to_here().sum() == 3
rpc.shutdown()
say("silent: done")
"""


SILENT_AT_THE_END = """
pid = rpc.rpc_sync(1, os.getpid)
hvd.barrier()
if rank != 0:
    rpc.shutdown()
else:
    stop(pid)
    text, seconds = error_of(lambda: rpc.shutdown(timeout=0.5))
    say(f"silent at the end: not {text!r}")
    os.kill(pid, signal.SIGCONT)
hvd.barrier()
begin()
assert rpc.rpc_sync(2 - rank, torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
rpc.shutdown()
say("silent at the end: well")
"""


MISSING = """
from hvlike.rpc import lifecycle

begun = threading.Event()

def stuck():
    begun.set()
    done.wait()

if rank == 0:
    rpc.rpc_async(2, stuck)
    # However busy the machine is, all are to say what they do.
    lifecycle.ANSWER_SECONDS = 30.0
    hvd.barrier()
    text, seconds = error_of(lambda: rpc.shutdown(timeout=0.5))
    say(f"missing: not {text!r}")
    hvd.barrier()
else:
    if rank == 2:
        begun.wait()
    hvd.barrier()
    hvd.barrier()
    done.set()
    rpc.shutdown()
say("missing: well")
"""


LOCAL = """
def slow():
    done.wait()
    return "too late"

def wait_for(other):
    return rpc.rpc_sync(other, slow)

hvd.barrier()
if rank == 1:
    time.sleep(0.2)
    rpc.shutdown(graceful=False)
    done.set()
else:
    # One that is being served, one that comes afterwards.
    for _ in range(2):
        text, seconds = error_of(lambda: rpc.rpc_sync(1, slow, timeout=30))
        assert "worker1 (rank 1)" in text, text
        assert seconds < 20, seconds
    assert rpc.rpc_sync(2 - rank, torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    text, seconds = error_of(lambda: rpc.rpc_sync(2 - rank, wait_for, (1,), timeout=30))
    assert "worker1 (rank 1)" in text, text
    rpc.shutdown()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
begin()
assert all(rpc.rpc_sync(other, torch.add, (torch.ones(1), 1)).item() == 2 for other in range(3))
rpc.shutdown()
say("alone: done")
"""


ENDED = """
hvd.barrier()
if rank == 1:
    time.sleep(0.2)
    sys.exit(0)
for _ in range(2):
    text, seconds = error_of(lambda: rpc.rpc_sync(1, time.sleep, (40,), timeout=30))
    assert "worker1 (rank 1)" in text, text
    assert seconds < 20, seconds
rpc.shutdown()
say("ended: done")
"""


@pytest.fixture(scope="module")
def sessions() -> Job:
    again = "done = threading.Event()\nbegin()\n"
    return run_job(PREAMBLE + again.join([SILENT, SILENT_AT_THE_END, LOCAL, MISSING, ENDED]), 3).check()


def said(job: Job, session: str) -> list[str]:
    """What the ranks have said of a session, in rank order."""
    return sorted(line for line in job.stdout.splitlines() if f": {session}: " in line)


def test_a_silent_worker_is_named_within_the_time_limit_and_serves_again_later(sessions: Job) -> None:
    assert said(sessions, "silent") == [f"rank {rank}: silent: done" for rank in range(3)]


def test_a_shutdown_with_a_time_limit_ends_beside_a_silent_worker_and_names_it(sessions: Job) -> None:
    error, *done = said(sessions, "silent at the end")
    assert "worker1 (rank 1) does not answer" in error
    assert done == [f"rank {rank}: silent at the end: well" for rank in range(3)]


def test_a_worker_that_leaves_alone_fails_its_callers_at_once_and_lets_the_others_end(sessions: Job) -> None:
    assert said(sessions, "alone") == [f"rank {rank}: alone: done" for rank in range(3)]


def test_a_shutdown_with_a_time_limit_says_who_still_does_what(sessions: Job) -> None:
    error, *done = said(sessions, "missing")
    assert "worker1 (rank 1) has not called shutdown" in error
    assert "worker2 (rank 2) has served stuck of worker0 for " in error
    assert done == [f"rank {rank}: missing: well" for rank in range(3)]


def test_a_program_that_ends_in_a_session_fails_its_callers_and_lets_the_others_end(sessions: Job) -> None:
    assert said(sessions, "ended") == [f"rank {rank}: ended: done" for rank in (0, 2)]


KILLED = """
def die():
    HOW

if rank == 1:
    done.wait()
start = time.monotonic()
try:
    rpc.rpc_sync(1, die, timeout=500)
except RuntimeError as error:
    say(f"{time.monotonic() - start:.1f} s: {error}")
    raise
"""

DEATHS = {
    "kill -9": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "os._exit(3)",
    "a thread that raises": "threading.Thread(target=lambda: 1 / 0, name='helper').start(); time.sleep(500)",
}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("how", DEATHS)
def test_a_killed_worker_ends_the_job(how: str) -> None:
    job = run_job(PREAMBLE + KILLED.replace("HOW", DEATHS[how]), 2)
    assert not job.timed_out, job.describe()
    assert job.survivors == (), job.describe()
    assert job.returncode != 0, job.describe()
    if how == "a thread that raises":
        assert "ZeroDivisionError" in job.stderr
        assert "rank 1 of 2" in job.stderr


FAILED = """
if rank == 1:
    time.sleep(0.3)
    raise ValueError("boom")
rpc.shutdown()
"""


def test_an_uncaught_exception_in_a_session_ends_the_job_though_others_wait_in_shutdown() -> None:
    job = run_job(PREAMBLE + FAILED, 2)
    assert not job.timed_out, job.describe()
    assert job.survivors == (), job.describe()
    assert job.returncode == 1 if IS_OPEN_MPI else job.returncode, job.describe()
    assert "ValueError: boom" in job.stderr

"""However a rank ends, the job ends with it in seconds: named, non-zero, and with nothing left behind."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.job import IS_OPEN_MPI, Job, RunningJob, start_job

pytestmark = pytest.mark.in_turn(4)

LIMIT_SECONDS = 30.0

# `end()` marks the moment from which the time is taken. The other ranks wait for rank 1 in a collective.
PREAMBLE = """
import atexit, os, signal, sys, threading, time
import torch
import hvlike as hvd

hvd.init()
for line in open("/proc/self/maps"):
    if "/dev/shm/" in line and "(deleted)" not in line:
        print("SHARED", line.split()[-1])

def end():
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"END {time.time()}\\n")
    sys.stdout.flush()

def work(name="work"):
    return hvd.allreduce(torch.ones(3), op=hvd.Sum, name=name)

assert work().tolist() == [hvd.size()] * 3
if hvd.rank() != 1:
    OTHERS
    sys.exit(0)
"""

WAIT_IN_COLLECTIVE = "work('never')"
COMPUTE_IN_PYTHON = "time.sleep(500)"


@dataclass(frozen=True)
class Ended:
    """A job that has ended, and how long after the event."""

    job: Job
    seconds: float
    left_in_shared_memory: list[str]


def program(body: str, others: str = WAIT_IN_COLLECTIVE) -> str:
    """Rank 1 runs `body`, the other ranks `others`."""
    return PREAMBLE.replace("OTHERS", others) + body


def finish(running: RunningJob, started: float, event: float | None = None) -> Ended:
    job = running.wait()
    if event is None:
        marks = [float(mark) for mark in re.findall(r"END ([\d.]+)", job.stdout)]
        assert marks, job.describe()
        event = min(marks)
    shared = {path for path in re.findall(r"SHARED (\S+)", job.stdout) if Path(path).exists()}
    return Ended(job, started + job.seconds - event, sorted(shared))


def run(body: str, others: str = WAIT_IN_COLLECTIVE, ranks: int = 2) -> Ended:
    started = time.time()
    with start_job(program(body, others), ranks) as running:
        return finish(running, started)


def check_clean(ended: Ended) -> None:
    """Ended in time, and nothing is left."""
    assert not ended.job.timed_out, ended.job.describe()
    assert ended.job.survivors == (), ended.job.describe()
    assert ended.seconds < LIMIT_SECONDS, ended.job.describe()
    assert ended.left_in_shared_memory == []


# What rank 1 does, the status of mpirun, what must be in its stderr.
FAILURES = {
    "exception": ("end(); raise ValueError('boom')", 1, ["rank 1 of 2", "Traceback", "ValueError: boom"]),
    "sys.exit with a status": (
        "atexit.register(print, 'exit handler ran', file=sys.stderr); end(); sys.exit(7)",
        7,
        ["rank 1 of 2", "status 7", "exit handler ran"],
    ),
    "sys.exit with a text": ("end(); sys.exit('no data here')", 1, ["no data here", "rank 1 of 2"]),
    "sys.exit after a caught one": (
        "end()\ntry:\n    sys.exit(5)\nexcept SystemExit:\n    sys.exit(6)",
        6,
        ["rank 1 of 2", "status 6"],
    ),
    "KeyboardInterrupt": ("end(); signal.raise_signal(signal.SIGINT)", 130, ["rank 1 of 2", "KeyboardInterrupt"]),
    "exception in a thread": (
        "end(); threading.Thread(target=lambda: 1 / 0, name='loader').start(); work('never')",
        1,
        ["thread loader on rank 1 of 2", "ZeroDivisionError"],
    ),
    "exception while a thread waits": (
        "threading.Thread(target=work, args=('of a thread',)).start(); end(); raise ValueError('boom')",
        1,
        ["rank 1 of 2", "ValueError: boom"],
    ),
    "exception under a hook installed later": (
        "sys.excepthook = lambda kind, error, trace: print('my hook saw', error, file=sys.stderr)\n"
        "end(); raise ValueError('boom')",
        1,
        ["my hook saw boom", "rank 1 of 2"],
    ),
    "exception at exit": (
        "atexit.register(work, 'at exit'); end(); raise ValueError('boom')",
        1,
        ["rank 1 of 2", "ValueError: boom"],
    ),
    "os._exit": ("end(); os._exit(3)", 3, []),
    "kill -9": ("end(); os.kill(os.getpid(), signal.SIGKILL)", None, []),
    "raise SystemExit": ("end(); raise SystemExit(3)", None, ["rank 1"]),
    "sys.exit(0) while others go on": ("end(); sys.exit(0)", 1, ["PeerLeftError", "rank 1"]),
    "end of the program while others go on": ("end()", 1, ["PeerLeftError", "rank 1"]),
}


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_rank_ends_the_job(how: str) -> None:
    body, status, texts = FAILURES[how]
    ended = run(body)
    check_clean(ended)
    assert ended.job.returncode != 0, ended.job.describe()
    if status is not None and IS_OPEN_MPI:
        assert ended.job.returncode == status, ended.job.describe()
    for text in texts:
        assert text.lower() in ended.job.stderr.lower(), ended.job.describe()


def test_a_failing_rank_ends_the_job_while_others_compute() -> None:
    ended = run("end(); raise ValueError('boom')", others=COMPUTE_IN_PYTHON, ranks=4)
    check_clean(ended)
    assert ended.job.returncode != 0
    assert "ValueError: boom" in ended.job.stderr
    assert ended.job.stderr.count("Traceback") == 1, ended.job.describe()


CAUGHT = """
try:
    sys.exit(3)
except SystemExit:
    pass
"""


@pytest.mark.parametrize(("first", "after"), [("", ""), (CAUGHT, "sys.exit(0)")], ids=["end", "caught sys.exit, exit"])
def test_ranks_may_end_at_different_times(first: str, after: str) -> None:
    ended = run(f"{first}\ntime.sleep(2); end(); {after}", others="pass")
    check_clean(ended)
    assert ended.job.returncode == 0, ended.job.describe()
    assert all(" INFO: 2 ranks on " in line for line in ended.job.stderr.splitlines())


def test_an_error_in_init_on_one_rank_ends_the_job() -> None:
    body = """
import sys, time
import hvlike as hvd
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    sys.stdout.write(f"END {time.time()}\\n")
    sys.stdout.flush()
    hvd.init(comm=[0])
hvd.init()
"""
    started = time.time()
    with start_job(body, 2) as running:
        ended = finish(running, started)
    check_clean(ended)
    assert ended.job.returncode != 0
    assert "a list without itself" in ended.job.stderr


def test_an_error_late_in_init_on_one_rank_ends_the_job() -> None:
    body = """
import sys, time
import hvlike as hvd
from hvlike.collectives.session import context
def fail(world, **options):
    sys.stdout.write(f"END {time.time()}\\n")
    sys.stdout.flush()
    raise OSError("no memory to share")
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    context.Fabric = fail
hvd.init()
"""
    started = time.time()
    with start_job("import os" + body, 2) as running:
        ended = finish(running, started)
    check_clean(ended)
    assert ended.job.returncode != 0
    assert "no memory to share" in ended.job.stderr


def test_children_of_a_rank_are_none_of_our_business() -> None:
    body = """
import multiprocessing
def fail():
    sys.exit(3)
child = multiprocessing.get_context("fork").Process(target=fail)
child.start()
child.join()
print("child ended with", child.exitcode, flush=True)
end()
work("never")
"""
    ended = run(body)
    check_clean(ended)
    assert ended.job.returncode == 0, ended.job.describe()
    assert "child ended with 3" in ended.job.stdout


def signal_launcher(number: signal.Signals, others: str) -> Ended:
    """Send a signal to mpirun once all ranks are at work; rank 1 does the same as the others."""
    started = time.time()
    text = program(f"print('at work', flush=True); {others}", f"print('at work', flush=True); {others}")
    with start_job(text, 2) as running:
        end = time.monotonic() + 60
        while running.output().count("at work") < 2:
            assert time.monotonic() < end, running.output() + running.errors()
            time.sleep(0.02)
        event = time.time()
        os.kill(running.launcher_pid, number)
        # Ranks that outlive mpirun by more than a short grace are its survivors.
        job = running.wait()
    shared = {path for path in re.findall(r"SHARED (\S+)", job.stdout) if Path(path).exists()}
    return Ended(job, started + job.seconds - event, sorted(shared))


SIGNALS = [
    (signal.SIGINT, WAIT_IN_COLLECTIVE),
    (signal.SIGINT, COMPUTE_IN_PYTHON),
    (signal.SIGTERM, COMPUTE_IN_PYTHON),
]


@pytest.mark.parametrize(("number", "others"), SIGNALS)
def test_a_signal_to_the_launcher_ends_the_job(number: signal.Signals, others: str) -> None:
    work = "work(f'of {hvd.rank()}')" if others == WAIT_IN_COLLECTIVE else others
    ended = signal_launcher(number, work)
    check_clean(ended)
    assert ended.job.returncode != 0, ended.job.describe()


@pytest.mark.parametrize("others", [WAIT_IN_COLLECTIVE, COMPUTE_IN_PYTHON])
def test_a_killed_launcher_leaves_no_rank(others: str) -> None:
    work = "work(f'of {hvd.rank()}')" if others == WAIT_IN_COLLECTIVE else others
    # Open MPI's files too: nobody else is there to remove them.
    check_clean(signal_launcher(signal.SIGKILL, work))


def test_singletons_are_refused() -> None:
    body = "import hvlike as hvd; print('hello'); hvd.init(); print('not reached')"
    with start_job(body, 1, env={"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}) as running:
        job = running.wait()
    assert job.returncode != 0
    assert "torchrun started 4 processes" in job.stderr
    assert "not reached" not in job.stdout

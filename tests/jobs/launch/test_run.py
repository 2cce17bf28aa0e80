"""hvd.run: a program that is no rank starts jobs, gets results and exceptions, and leaves nothing behind, however it
ends itself.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from support.job import RunningJob, job_environment

pytestmark = pytest.mark.in_turn(3)

PROGRAM = """
import sys
import torch
import hvlike as hvd

class Own(Exception):
    pass

def train(start, *, fail):
    hvd.init()
    print(f"rank {hvd.rank()} trains", flush=True)
    total = hvd.allreduce(torch.full((2,), start + hvd.rank()), op=hvd.Sum)
    if fail and hvd.rank() == 1:
        raise Own("of rank 1")
    hvd.barrier()
    return hvd.rank(), total

for rank, (own, total) in enumerate(hvd.run(train, (1.0,), {"fail": False}, np=3)):
    assert own == rank and torch.equal(total, torch.full((2,), 6.0)), (own, total)
try:
    hvd.run(train, (1.0,), {"fail": True})
except Own as error:
    assert "in train" in str(error.__cause__), error.__cause__
    print("raised again:", error)
assert "mpi4py.MPI" not in sys.modules
"""

INTERRUPTED = """
import signal
import time
import hvlike as hvd

def sleep():
    hvd.init()
    hvd.barrier()
    print("all sleep", flush=True)
    time.sleep(60)

# As a shell's background job this process may have been told to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    hvd.run(sleep)
except KeyboardInterrupt:
    print("interrupted")
"""


def start(text: str) -> RunningJob:
    folder = Path(tempfile.mkdtemp(prefix="hvlike-job-"))
    program = folder / "program.py"
    program.write_text(text)
    return RunningJob([sys.executable, str(program)], job_environment({}), folder)


def test_results_and_the_first_exception_come_back() -> None:
    with start(PROGRAM) as running:
        job = running.wait().check()
    lines = job.stdout.splitlines()
    assert {f"rank {rank} trains" for rank in range(3)} < set(lines)
    assert "raised again: of rank 1" in lines


def test_an_interrupt_ends_the_job() -> None:
    with start(INTERRUPTED) as running:
        running.wait_for_output("all sleep")
        os.kill(running.launcher_pid, signal.SIGINT)
        job = running.wait(60).check()
    assert "interrupted" in job.stdout.splitlines()


FOREVER = """
import signal
import time
import torch
import hvlike as hvd

def forever():
    hvd.init()
    print("at work", flush=True)
    while True:
        hvd.allreduce(torch.ones(2))
        time.sleep(0.05)

# What starts these tests may have it ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
hvd.run(forever)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_job_never_outlives_its_caller(number: signal.Signals) -> None:
    with start(FOREVER) as running:
        # The end of its output is the caller's to copy.
        running.wait_for_output("at work")
        folder = running.folder
        os.kill(running.launcher_pid, number)
        job = running.wait(60)
        assert job.returncode == -number, job.describe()
        assert job.survivors == (), job.describe()
        assert sorted(path.name for path in folder.iterdir()) == ["program.py", "stderr", "stdout"]


FAILING_STREAM = """
import sys
import hvlike as hvd

class Hostile:
    def __getattr__(self, name):
        raise OSError(name)

def train():
    print("x" * 100, flush=True)
    for _ in range(2000):
        print("y" * 100)
    return "done"

sys.stdout = Hostile()
results = hvd.run(train)
sys.stdout = sys.__stdout__
print(results, flush=True)
"""


def test_a_stream_of_the_callers_that_fails_holds_no_job_up() -> None:
    with start(FAILING_STREAM) as running:
        job = running.wait(60).check()
    assert "['done', 'done']" in job.stdout
    # Python's own stdout has taken it.
    assert job.stdout.count("y" * 100) == 4000

"""A rank that keeps the others waiting is named in the log; the job goes on when it comes."""

import re

import pytest
from support.job import Job, run_job

pytestmark = [pytest.mark.in_turn(2), pytest.mark.together]

# Starts one after the other; each line that the reports name is found again by its text.
REPORTS = """
import os, sys, time
import torch
import hvlike as hvd

hvd.init()
for _ in range(8):
    early = hvd.allreduce(torch.ones(1), name="early")
if hvd.rank() == 1:
    time.sleep(float(sys.argv[1]))
total = hvd.allreduce(torch.ones(3), name="late", op=hvd.Sum)
assert torch.equal(total, torch.full((3,), float(hvd.size())))
hvd.shutdown()

hvd.init()
model = torch.nn.Linear(4, 1)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    if hvd.rank() == 1 and step == 2:
        time.sleep(4.0)
    opt.step()
hvd.shutdown()

os.environ["HVLIKE_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
hvd.init()
if hvd.rank() == 1:
    # Longer than the limit, and shorter than the others need for two: they wait for this rank once more at the end.
    time.sleep(3.7)
try:
    hvd.allreduce(torch.ones(3), name="too late")
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()} got {type(error).__name__}: {error}", flush=True)
hvd.shutdown()
"""


def at(line: str) -> str:
    """How a report names this line of the program."""
    return rf"program.py:{REPORTS.splitlines().index(line) + 1}"


def both_at(place: str) -> str:
    """Ranks 0 and 2 in any order. In the first report rank 2 may be missing, too, where it is late itself."""
    return rf"rank [02] \(\S*{place}, since \d+ s\), rank [02] \(\S*{place}, since \d+ s\)"


@pytest.fixture(scope="module")
def reports() -> Job:
    return run_job(REPORTS, 3, args=["4"], env={"HVLIKE_STALL_CHECK_TIME_SECONDS": "1"}).check()


def test_the_report_names_what_waits_where_and_what_the_missing_rank_did_last(reports: Job) -> None:
    assert "waiting for remainder of ranks for more than 1 seconds" in reports.stderr
    here = at('total = hvd.allreduce(torch.ones(3), name="late", op=hvd.Sum)')
    before = at('    early = hvd.allreduce(torch.ones(1), name="early")')
    asleep = at("    time.sleep(float(sys.argv[1]))").replace(".py:", '.py", line ')
    missing = rf"rank 1, which submitted last allreduce 'early' at \S*{before}, \d+ s ago"
    stack = rf'  rank 1 is at\n  File "\S*{asleep}, in <module>\n    time.sleep\(float\(sys.argv\[1\]\)\)\n'
    report = rf"allreduce 'late': float32 \[3\]\n  waits on {both_at(here)}\n  missing: {missing}\n{stack}"
    assert re.search(report, reports.stderr), reports.stderr


def test_the_report_covers_planned_steps(reports: Job) -> None:
    step = at("    opt.step()")
    missing = rf"rank 1, which submitted last step 'DistributedOptimizer\(\w+, .*weight\)' at .*{step}, \d+ s ago"
    report = rf"step 'DistributedOptimizer\(.*weight\)'.*weight.*\n  waits on {both_at(step)}\n  missing: {missing}"
    assert re.search(report, reports.stderr), reports.stderr


def test_the_shutdown_limit_raises_on_every_rank(reports: Job) -> None:
    assert reports.stdout.count("got StalledError: hvlike: Horovod has been shut down: operations have waited") == 3
    assert "missing: rank 1" in reports.stdout


QUIET = """
import os, time
import torch
import hvlike as hvd

off = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_CHECK_DISABLE": "1"}
for settings in (off, {}):
    os.environ.update(settings)
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(2.5)
    hvd.allreduce(torch.ones(3), name="late")
    hvd.shutdown()
    for name in settings:
        del os.environ[name]
"""


def test_no_word_where_the_check_is_off_or_a_wait_of_ordinary_length() -> None:
    assert "waiting for remainder" not in run_job(QUIET, 2).check().stderr


STOPPED = """
import os
import signal
import threading
import torch
import hvlike as hvd
from hvlike.collectives.session.context import current

hvd.init()
processes = hvd.allgather_object(os.getpid())
tensor = torch.ones(64 << 20)
if hvd.rank() == 1:
    handle = hvd.allreduce_async_(tensor, name="large", op=hvd.Sum)
    controller = current().find_set(None, "test").controller
    while not controller.tensor_queue.may_begin(("allreduce", "large")):
        hvd.poll(handle)
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    threading.Timer(5.0, os.kill, (processes[1], signal.SIGCONT)).start()
    handle = hvd.allreduce_async_(tensor, name="large", op=hvd.Sum)
assert hvd.synchronize(handle)[-1] == 2
print(f"rank {hvd.rank()} done", flush=True)
"""


def test_a_rank_that_stops_while_data_are_moved_is_reported() -> None:
    job = run_job(STOPPED, 2, env={"HVLIKE_STALL_CHECK_TIME_SECONDS": "1", "HVLIKE_RANKS_PER_NODE": "1"}).check()
    assert " s in allreduce 'large', for the data: all ranks have asked for it" in job.stderr
    assert job.stdout.count("done") == 2

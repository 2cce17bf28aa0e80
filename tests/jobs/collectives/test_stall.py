"""A rank that keeps the others waiting is named in the log; the job goes on when it comes."""

import re

from support.job import run_job

PROGRAM = """
import sys, time
import torch
import hvlike as hvd

hvd.init()
for _ in range(8):
    early = hvd.allreduce(torch.ones(1), name="early")
if hvd.rank() == 1:
    time.sleep(float(sys.argv[1]))
total = hvd.allreduce(torch.ones(3), name="late", op=hvd.Sum)
assert torch.equal(total, torch.full((3,), float(hvd.size())))
print(f"rank {hvd.rank()} done", flush=True)
"""


def test_the_report_names_what_waits_where_and_what_the_missing_rank_did_last() -> None:
    job = run_job(PROGRAM, 3, args=["4"], env={"HVLIKE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    assert "waiting for remainder of ranks for more than 1 seconds" in job.stderr
    # In the first report rank 2 may be missing, too, where it is late itself.
    waits = r"rank 0 \(\S*program.py:11, since \d+ s\), rank 2 \(\S*program.py:11, since \d+ s\)"
    missing = r"rank 1, which submitted last allreduce 'early' at \S*program.py:8, \d+ s ago"
    stack = r'  rank 1 is at\n  File "\S*program.py", line 10, in <module>\n    time.sleep\(float\(sys.argv\[1\]\)\)\n'
    report = rf"allreduce 'late': float32 \[3\]\n  waits on {waits}\n  missing: {missing}\n{stack}"
    assert re.search(report, job.stderr), job.stderr
    assert job.stdout.count("done") == 3


STEPS = """
import time
import torch
import hvlike as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    if hvd.rank() == 1 and step == 2:
        time.sleep(4.0)
    opt.step()
print(f"rank {hvd.rank()} done", flush=True)
"""


def test_the_report_covers_planned_steps() -> None:
    job = run_job(STEPS, 2, env={"HVLIKE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    report = re.search(r"step 'DistributedOptimizer.noname.0'(.*)\n  waits on (.*)\n  missing: (.*)", job.stderr)
    assert report is not None, job.stderr
    assert "weight" in report[1]
    assert re.fullmatch(r"rank 0 \(.*program.py:14, since \d+ s\)", report[2])
    assert re.fullmatch(
        r"rank 1, which submitted last step 'DistributedOptimizer.noname.0' at .*:14, \d+ s ago", report[3]
    )
    assert job.stdout.count("done") == 2


ENDED = """
import time
import torch
import hvlike as hvd

hvd.init()
if hvd.rank() == 1:
    time.sleep(5.0)
try:
    hvd.allreduce(torch.ones(3), name="late")
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()} got {type(error).__name__}: {error}", flush=True)
hvd.shutdown()
"""


def test_the_shutdown_limit_raises_on_every_rank() -> None:
    limits = {"HVLIKE_STALL_CHECK_TIME_SECONDS": "1", "HVLIKE_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    job = run_job(ENDED, 3, env=limits).check()
    assert job.stdout.count("got StalledError: Horovod has been shut down: operations have waited") == 3
    assert "missing: rank 1" in job.stdout


def test_the_check_can_be_switched_off() -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert "waiting for remainder" not in run_job(PROGRAM, 2, args=["2.5"], env=limits).check().stderr


def test_a_wait_of_ordinary_length_is_not_worth_a_word() -> None:
    job = run_job(PROGRAM, 2, args=["2"]).check()
    assert "waiting for remainder" not in job.stderr


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

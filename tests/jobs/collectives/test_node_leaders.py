"""Members of a node speak to the coordinator through the first of them: 4 ranks as 2 x 2, where rank 2 leads rank 3."""

import re

import pytest
from support.job import IS_OPEN_MPI, Job, run_job

pytestmark = [pytest.mark.in_turn(1), pytest.mark.together]

TWO_NODES = {"HVLIKE_RANKS_PER_NODE": "2"}

PROGRAM = """
import os, signal, sys, threading, time
import torch
import hvlike as hvd
from hvlike.collectives.session.context import current

hvd.init()
rank = hvd.rank()

def say(text):
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"rank {rank}: {text}\\n")
    sys.stdout.flush()

def error_of(call):
    try:
        return f"no error: {call()}"
    except hvd.HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"
"""

COUNTED = """
OPERATIONS = 50
tensors = [torch.full((3,), float(rank)) for _ in range(5)]

def operation(number):
    # All at once, in another order on every rank.
    order = tensors[(number + rank) % 5 :] + tensors[: (number + rank) % 5]
    names = [str((number + rank + index) % 5) for index in range(5)]
    handles = [hvd.broadcast_async_(each, 3, name=name) for each, name in zip(order, names)]
    for handle in handles:
        hvd.synchronize(handle)

for number in range(3):
    operation(number)
hvd.barrier()
traffic = current().fabric.traffic
before = traffic.snapshot()
for number in range(OPERATIONS):
    hvd.broadcast_(tensors[0], 3, name="counted")
sent = (traffic.snapshot() - before).control
hvd.barrier()
for number in range(OPERATIONS):
    operation(number)
assert all(torch.equal(each, torch.full((3,), 3.0)) for each in tensors)
uneven = [hvd.allgather(torch.full((1 + (number + rank) % 2,), rank), name="uneven") for number in range(6)]
assert [len(each) for each in uneven] == [6] * 6
say({kind: sent.get(kind, 0) / OPERATIONS for kind in ("ready", "responses")})
say(error_of(lambda: hvd.allreduce(torch.ones(3 + rank // 3), name="mismatch")))
say(error_of(lambda: hvd.allreduce(torch.ones(3), name=f"name {rank // 3}")))
if rank != 3:
    for number in range(5):
        total = hvd.allreduce(torch.ones(3), name="counted", op=hvd.Sum)
        assert total.tolist() == [3.0] * 3, total
elif rank == 3:
    time.sleep(0.2)
assert hvd.join() in range(3)
for number in range(3):
    operation(number)
say("counted")
"""

LEFT = """
hvd.broadcast_(torch.ones(3), 3, name="before")
hvd.barrier()
if rank == 2:
    time.sleep(1.0)
    LEAVE
else:
    OTHERS
    started = time.monotonic()
    pending = hvd.broadcast_async(torch.ones(3), 3, name="pending")
    say(error_of(lambda: hvd.broadcast(torch.ones(3), 3, name="waited for")))
    say(error_of(lambda: hvd.synchronize(pending)))
    say(error_of(lambda: hvd.barrier()))
    say(f"in time: {time.monotonic() - started < 20}")
"""

AGAIN = """
hvd.shutdown()
hvd.init()
"""


def left(leave: str, others: str = "pass", end: str = "") -> str:
    """Rank 2, which leads rank 3, leaves in this way."""
    return LEFT.replace("LEAVE", leave).replace("OTHERS", others) + end


@pytest.fixture(scope="module")
def starts() -> Job:
    """One after the other."""
    parts = [PROGRAM + COUNTED, left("hvd.shutdown()"), left("sys.exit(0)")]
    return run_job(AGAIN.join(parts), 4, env=TWO_NODES).check()


def test_the_coordinator_takes_and_sends_a_message_for_each_node(starts: Job) -> None:
    found = re.findall(r"rank (\d): {'ready': ([\d.]+), 'responses': ([\d.]+)}", starts.stdout)
    ready = {int(rank): float(count) for rank, count, _ in found}
    responses = {int(rank): float(count) for rank, _, count in found}
    assert responses == {0: 2.0, 1: 0.0, 2: 1.0, 3: 0.0}
    assert (ready[0], ready[1], ready[3]) == (0.0, 1.0, 1.0)
    # What has begun when a health check comes goes on in two parts.
    assert 1.0 <= ready[2] < 1.5


def test_errors_name_the_ranks_behind_a_leader(starts: Job) -> None:
    mismatch = "ShapeMismatchError: Mismatched ALLREDUCE tensor shapes for 'mismatch': "
    mismatch += "ranks 0, 1, 2 passed [3], rank 3 passed [4]."
    deadlock = "DeadlockError: no rank can go on: rank 0 waits in allreduce 'name 0', rank 1 waits in allreduce "
    deadlock += "'name 0', rank 2 waits in allreduce 'name 0', rank 3 waits in allreduce 'name 1'."
    for text in (mismatch, deadlock, ": counted"):
        assert starts.stdout.count(text) == 4, starts.describe()


STALLS = """
processes = hvd.allgather_object(os.getpid())
if rank == 3:
    time.sleep(3.0)
hvd.allreduce(torch.ones(3), name="member late")
if rank == 0:
    threading.Timer(4.0, os.kill, (processes[2], signal.SIGCONT)).start()
hvd.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
hvd.allreduce(torch.ones(3), name="leader late")
say("reported")
"""


def test_reports_name_who_is_missing_behind_a_leader_and_a_leader_that_is_stuck() -> None:
    job = run_job(PROGRAM + STALLS, 4, env={**TWO_NODES, "HVLIKE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    waits = r"allreduce 'member late': float32 \[3\]\n  waits on rank 0 .*, rank 1 .*, rank 2 .*\n  missing: rank 3, "
    assert re.search(waits + "which submitted last", job.stderr), job.describe()
    waits = r"allreduce 'leader late': float32 \[3\]\n  waits on rank 0 .*, rank 1 .*, rank 3 .*\n  missing: rank 2, "
    assert re.search(waits + "which does not answer", job.stderr), job.describe()
    through = "rank 2, through which this node asks, is stuck inside hvlike"
    assert re.search(rf"rank 3 has waited for \d+ s in allreduce 'leader late', .*: {through}", job.stderr)
    assert job.stdout.count(": reported") == 4


def test_a_leader_that_leaves_ends_what_waits_for_it(starts: Job) -> None:
    assert starts.stdout.count("in time: True") == 2 * 3, starts.describe()
    for error in ("ShutdownError", "PeerLeftError"):
        assert len(re.findall(rf"rank [013]: {error}: .*rank 2", starts.stdout)) == 9, starts.describe()


@pytest.mark.skipif(not IS_OPEN_MPI, reason="a flag of Open MPI's mpirun")
def test_a_leader_that_dies_ends_what_its_members_wait_for() -> None:
    # The others are told by nobody here: a launcher ends the job.
    others = "if rank < 2: time.sleep(8); os._exit(0)"
    program = PROGRAM + left("os.kill(os.getpid(), signal.SIGKILL)", others, "os._exit(0)")
    job = run_job(program, 4, env=TWO_NODES, flags=["--enable-recovery"])
    said = re.findall(r"rank 3: (\w+): .*rank 2", job.stdout)
    assert said == ["PeerLeftError"] * 3, job.describe()
    assert "rank 3: in time: True" in job.stdout

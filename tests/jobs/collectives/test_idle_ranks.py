"""A rank with nothing in flight costs nothing, and leaves nothing behind."""

from support.job import run_job

# While the main thread sleeps only hvlike's own thread can use the processor.
PROGRAM = """
import resource, sys, threading, time
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

def report():
    time.sleep(1)
    start = used()
    time.sleep(2)
    # One write: the lines of both ranks must not be mixed.
    sys.stdout.write(f"{(used() - start) / 2:.4f}\\n")
    sys.stdout.flush()

report()
# One rank asks, the other is busy elsewhere: both sleep until it comes.
handle = hvd.allreduce_async(torch.ones(9), name="late") if hvd.rank() == 0 else None
report()
hvd.barrier()
handle = handle or hvd.allreduce_async(torch.ones(9), name="late")
hvd.synchronize(handle)
hvd.shutdown()
names = [thread.name for thread in threading.enumerate() if "hvlike" in thread.name]
assert not names, names
"""


def test_a_rank_that_is_idle_or_waits_uses_less_than_one_percent_of_a_core() -> None:
    # Of each rank: while nothing is in flight, and while one waits for the other.
    found = [float(line) for line in run_job(PROGRAM, 2).check().stdout.split()]
    assert len(found) == 4
    assert max(found) < 0.01

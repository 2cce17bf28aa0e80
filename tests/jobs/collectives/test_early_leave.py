"""A rank that ends, or shuts hvlike down, while others go on: an error that names it, at once, and no rank hangs."""

import pytest
from support.job import run_job

# The arguments: who shuts hvlike down in each of the first starts, and who ends its program in the last one.
PROGRAM = """
import sys, time
import torch
import hvlike as hvd
from hvlike.errors import PeerLeftError, ShutdownError

def say(text):
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"rank {hvd.rank()}: {text}\\n")
    sys.stdout.flush()

def begin():
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3

def fail(leaver, kind):
    started = time.monotonic()
    pending = hvd.allreduce_async(torch.ones(3), name="pending")
    caught = []
    for call in (
        lambda: hvd.allreduce(torch.ones(3), name="grad"),
        lambda: hvd.synchronize(pending),
        lambda: hvd.broadcast_(torch.ones(3), root_rank=0),
        lambda: hvd.barrier(),
        lambda: hvd.allreduce(torch.ones(500_000)),
    ):
        try:
            call()
        except kind as error:
            caught.append(str(error))
    say(f"without {leaver}: {len(caught)} errors, in time: {time.monotonic() - started < 30}; {caught[0]}")

*shut_down, ended = map(int, sys.argv[1:])
for leaver in shut_down:
    begin()
    if hvd.rank() != leaver:
        fail(leaver, ShutdownError)
    hvd.shutdown()

begin()
handle = hvd.allreduce_async(torch.ones(5), name=f"only {hvd.rank()}")
hvd.shutdown()
try:
    hvd.synchronize(handle)
except hvd.HorovodInternalError as error:
    print("in flight:", type(error).__name__, error, flush=True)

begin()
if hvd.rank() == ended:
    sys.exit(0)
fail(ended, PeerLeftError)
"""


@pytest.mark.parametrize(("shut_down", "ended"), [([0, 2], 1), ([], 0)], ids=str)
def test_those_that_stay_are_told_and_a_new_start_works(shut_down: list[int], ended: int) -> None:
    said = run_job(PROGRAM, 3, args=[*map(str, shut_down), str(ended)]).check().stdout.splitlines()
    for leaver in [*shut_down, ended]:
        for rank in {0, 1, 2} - {leaver}:
            (line,) = [each for each in said if each.startswith(f"rank {rank}: without {leaver}: ")]
            assert "5 errors, in time: True; " in line
            if leaver == ended:
                assert f"; allreduce 'grad' cannot be completed: rank {leaver}" in line
                assert f"Rank {leaver} has ended its program while other ranks go on." in line
            else:
                assert f"Horovod has been shut down on rank {leaver}" in line
    assert sum(line.startswith("in flight: ShutdownError hvlike: Horovod has been shut down") for line in said) == 3
    assert len(said) == 2 * len(shut_down) + 3 + 2


TOGETHER = """
import time
import torch
import hvlike as hvd

for ending in (hvd.shutdown, lambda: None):
    hvd.init()
    time.sleep(0.3 * hvd.rank())
    assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum)[-1] == hvd.size()
    ending()
"""


def test_ranks_that_shut_down_and_that_end_together_do_so_quietly() -> None:
    job = run_job(TOGETHER, 3, env={"HVLIKE_LOG_LEVEL": "warning"}).check()
    assert job.stdout == ""
    assert job.stderr == ""

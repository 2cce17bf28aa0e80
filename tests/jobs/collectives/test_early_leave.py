"""A rank that ends, or shuts hvlike down, while others go on: an error that names it, at once, and no rank hangs."""

import pytest
from support.job import run_job

PROGRAM = """
import sys, time
import torch
import hvlike as hvd
from hvlike.errors import PeerLeftError, ShutdownError

hvd.init()
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
if hvd.rank() == LEAVER:
    LEAVE
    sys.exit(0)
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
    except ERROR as error:
        caught.append(str(error))
print(f"rank {hvd.rank()}: {len(caught)} errors, in time: {time.monotonic() - started < 30}; {caught[0]}", flush=True)
"""


def run(leaver: int, leave: str, error: str, ranks: int = 3) -> list[str]:
    """What the ranks that stay have printed, in rank order."""
    program = PROGRAM.replace("LEAVER", str(leaver)).replace("LEAVE", leave).replace("ERROR", error)
    return sorted(run_job(program, ranks).check().stdout.splitlines())


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_program_that_ends_early(leaver: int) -> None:
    said = run(leaver, "pass", "PeerLeftError")
    stay = [rank for rank in range(3) if rank != leaver]
    for rank, line in zip(stay, said, strict=True):
        assert line.startswith(
            f"rank {rank}: 5 errors, in time: True; allreduce 'grad' cannot be completed: rank {leaver}"
        )
        assert f"Rank {leaver} has ended its program while other ranks go on." in line


@pytest.mark.parametrize("leaver", [0, 2])
def test_shutdown_on_one_rank(leaver: int) -> None:
    said = run(leaver, "hvd.shutdown()", "ShutdownError")
    stay = [rank for rank in range(3) if rank != leaver]
    for rank, line in zip(stay, said, strict=True):
        assert line.startswith(f"rank {rank}: 5 errors, in time: True; ")
        assert f"Horovod has been shut down on rank {leaver}" in line


TOGETHER = """
import time
import torch
import hvlike as hvd

hvd.init()
time.sleep(0.3 * hvd.rank())
assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum)[-1] == hvd.size()
ENDING
"""


@pytest.mark.parametrize(("ending", "ranks"), [("hvd.shutdown()", 2), ("", 3)], ids=["shutdown", "end"])
def test_ranks_that_end_together_end_quietly(ending: str, ranks: int) -> None:
    job = run_job(TOGETHER.replace("ENDING", ending), ranks).check()
    assert job.stdout == ""
    assert job.stderr == ""


UNFINISHED = """
import torch
import hvlike as hvd

hvd.init()
handle = hvd.allreduce_async(torch.ones(5), name=f"only {hvd.rank()}")
hvd.shutdown()
try:
    hvd.synchronize(handle)
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error, flush=True)
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
"""


def test_what_is_in_flight_at_shutdown_fails_and_a_new_start_works() -> None:
    said = run_job(UNFINISHED, 2).check().stdout.splitlines()
    assert len(said) == 2
    assert all(line.startswith("ShutdownError Horovod has been shut down") for line in said)

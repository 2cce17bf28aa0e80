"""A process that a rank forks ends with its own status, however it ends; the rank goes on, and the job ends well."""

import json

import pytest
from support.job import run_job

PROGRAM = """
import os, sys, atexit, json
import torch
{imports}
import hvlike as hvd

hvd.init()
hvd.allreduce(torch.ones(1), name="before")
atexit.register(lambda: os.getpid() == rank or os.write(1, b"handler of a child\\n"))
rank = os.getpid()
for ending in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        sys.stdout.write("buffered by a child\\n")
        exec(ending)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"{{hvd.rank()}} {{ending}}: {{status}}\\n".encode())
if os.getpid() == rank:
    assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == hvd.size()
"""

ENDINGS = {
    "sys.exit(7)": 7,
    "sys.exit('a text')": 1,
    "raise ValueError('boom')": 1,
    "raise SystemExit(5)": 5,
    "exit(4)": 4,
    "pass": 0,
}
UNSEEN = ("raise SystemExit(5)", "exit(4)")
"""Where the program has started MPI the statuses of these cannot be seen."""


@pytest.mark.parametrize("imports", ["", "from mpi4py import MPI"], ids=["hvlike starts MPI", "the program starts MPI"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_ends_with_its_status(ranks: int, imports: str) -> None:
    statuses = {ending: 0 if imports and ending in UNSEEN else status for ending, status in ENDINGS.items()}
    job = run_job(PROGRAM.format(imports=imports), ranks, args=[json.dumps(list(ENDINGS))], timeout=90).check()
    expected = {f"{rank} {ending}: {status}" for rank in range(ranks) for ending, status in statuses.items()}
    assert {line for line in job.stdout.splitlines() if ": " in line} == expected, job.describe()
    for text in ("handler of a child", "buffered by a child"):
        assert job.stdout.count(text) == ranks * len(ENDINGS), job.describe()

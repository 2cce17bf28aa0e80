"""The laws of the collectives hold across nodes too: the same tests, with one host treated as several."""

import pytest
from support.job import CHECKOUT, run_job

LAWS = ("allreduce_values", "allreduce_shapes", "allreduce_factors", "broadcast_values", "allgather_values")
LAWS += ("alltoall_values", "reducescatter_values", "submission_order", "random_programs", "process_sets")
LAWS += ("adasum_allreduce",)

SHORT = ("allreduce_values", "random_programs")
"""For equal nodes, of which most is seen with unequal ones."""

PROGRAM = f"""
import os
import sys
from pathlib import Path
import pytest
from hvlike.backends import hierarchical, waves
waves.SHARD_BYTES = 8192
if os.environ["WAVES"] == "yes":
    hierarchical.LEADER_BYTES = hierarchical.CROWDED_LEADER_BYTES = 0
folder = Path("{CHECKOUT}/tests/ranks/collectives")
files = [str(file) for name in os.environ["LAWS"].split() for file in folder.rglob(f"test_{{name}}.py")]
assert len(files) == len(os.environ["LAWS"].split())
sys.exit(pytest.main(["-q", "-x", "--rootdir", "{CHECKOUT}", "-c", "{CHECKOUT}/pyproject.toml", *files]))
"""


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("ranks", "a_node"), [(4, 2), (3, 2)], ids=["2 + 2", "2 + 1"])
def test_laws(ranks: int, a_node: int) -> None:
    laws = LAWS if ranks % a_node else SHORT
    # Equal nodes in waves, small ones: the tensors of these tests would all go in one. Unequal ones by their leaders.
    env = {"HVLIKE_RANKS_PER_NODE": str(a_node), "WAVES": "no" if ranks % a_node else "yes", "LAWS": " ".join(laws)}
    # Of so many values a part will do; simulated jobs have nodes, too.
    env["HVLIKE_TEST_PART"] = "1/3"
    job = run_job(PROGRAM, ranks, env=env, timeout=110).check()
    assert " passed" in job.stdout


# Open MPI makes the communicator of a set with messages of its own, which once met those of the channel: the fourth
# or fifth start with several sets across nodes failed.
STARTS = """
import torch
import hvlike as hvd

for _ in range(25):
    hvd.init()
    size = hvd.size()
    hvd.shutdown()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    hvd.init(process_sets=[even, odd, hvd.ProcessSet([size - 1])])
    hvd.allreduce(torch.ones(3), process_set=odd if hvd.rank() % 2 else even)
    hvd.shutdown()
"""


def test_sets_across_nodes_start_again_and_again() -> None:
    run_job(STARTS, 3, env={"HVLIKE_RANKS_PER_NODE": "1"}).check()

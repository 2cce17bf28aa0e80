"""A rank whose tensor is on its way to a rank on another node that has left gets an error, and does not wait for it."""

from support.job import run_job

PROGRAM = """
import time
import torch
import hvlike as hvd
from hvlike.errors import PeerLeftError

hvd.init()
tensor = torch.ones(60_000)  # Half of it follows the offer
for _ in range(20):
    hvd.allreduce_(tensor, name="tensor")
if hvd.rank() == 0:
    for _ in range(2):
        try:
            hvd.allreduce_(tensor, name="tensor")
        except PeerLeftError as error:
            print("left", "rank 1" in str(error))
else:
    time.sleep(0.3)
"""


def test_the_peer_of_a_call_in_halves_has_left() -> None:
    job = run_job(PROGRAM, 2, env={"HVLIKE_RANKS_PER_NODE": "1"}, timeout=40)
    assert job.stdout.count("left True") == 2, job

"""HVLIKE_KEEP_MEMORY=1: memory that was freed is used again without being mapped and cleared anew."""

import os
import platform

import pytest
from support.job import run_job

BLOCKS = 4
WARMUP = 20
"""glibc before 2.38 uses a block again only after it has made up to seven others of that size."""
PAGES = (48 << 20) // os.sysconf("SC_PAGESIZE")

PROGRAM = f"""
import resource
import torch
import hvlike as hvd

def touch():
    torch.ones({PAGES * os.sysconf("SC_PAGESIZE")}, dtype=torch.uint8)

hvd.init()
for _ in range({WARMUP}):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({BLOCKS}):
    touch()
print("FAULTS", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc's")
@pytest.mark.parametrize("keep", [False, True])
def test_a_block_that_is_asked_for_again_costs_no_page_faults(keep: bool) -> None:
    # Transparent huge pages would hide how many pages are mapped anew.
    settings = {"HVLIKE_KEEP_MEMORY": str(int(keep)), "THP_MEM_ALLOC_ENABLE": "0"}
    job = run_job(PROGRAM, 1, env=settings).check()
    faults = int(job.stdout.split("FAULTS")[1])
    assert faults < PAGES / 4 if keep else faults > BLOCKS * PAGES / 2

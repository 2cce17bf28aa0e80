"""The command lines that docs/launching.md gives for the launcher that is here start the ranks they say."""

import re
import shlex
from pathlib import Path

import pytest
from support.job import CHECKOUT, IS_OPEN_MPI, LAUNCHER, RunningJob, job_environment

HEADING = "### Open MPI 5" if IS_OPEN_MPI else "### MPICH"

PROGRAM = """
import torch
import hvlike as hvd

hvd.init()
total = hvd.allreduce(torch.full((2,), float(hvd.rank())), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total[0]:g}", flush=True)
"""
# The page's machine may have more cores than this one; as root it takes a word more.
HERE = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def lines() -> list[str]:
    section = (CHECKOUT / "docs" / "launching.md").read_text().partition(f"\n{HEADING}\n")[2].partition("\n##")[0]
    return re.findall(r"^\$ (mpirun .*)$", section, re.MULTILINE)


def test_there_are_lines() -> None:
    assert len(lines()) >= 2


@pytest.mark.parametrize("line", lines())
def test_a_line_starts_the_ranks_it_says(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = shlex.split(line)
    ranks = int(words[words.index("-n") + 1])
    words[0] = str(LAUNCHER)
    words[words.index("train.py")] = str(tmp_path / "train.py")
    with RunningJob(words, job_environment({**HERE, "PATH": f"{LAUNCHER.parent}:/usr/bin:/bin"}), tmp_path) as running:
        job = running.wait().check()
    expected = [f"rank {rank} of {ranks}: {ranks * (ranks - 1) // 2}" for rank in range(ranks)]
    assert sorted(job.stdout.splitlines()) == expected

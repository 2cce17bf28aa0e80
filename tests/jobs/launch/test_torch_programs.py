"""`mpirun ... python -m hvlike run`: programs of torchrun with any backend, as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.job import job_environment, run_job

pytestmark = [pytest.mark.in_turn(2), pytest.mark.job]

CONSOLE = "import sys\nfrom hvlike.__main__ import console\nsys.exit(console())\n"


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """The script `hvlike` of an installation."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "hvlike"
    path.write_text(CONSOLE)
    return path


OF_TORCHRUN = """
import os
import sys
if __name__ == "__main__":
    assert "mpi4py.MPI" in sys.modules and "torch" not in sys.modules, "MPI first"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
import torch
import torch.distributed as dist
import torch.multiprocessing

def child(answers):
    answers.put(os.environ["MASTER_PORT"])

if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert (dist.get_rank(), dist.get_world_size(), tensor.item()) == (rank, size, size)
    dist.destroy_process_group()
    spawning = torch.multiprocessing.get_context("spawn")
    answers = spawning.SimpleQueue()
    process = spawning.Process(target=child, args=[answers])
    process.start()
    assert answers.get() == os.environ["MASTER_PORT"]
    process.join()
    print(*here, flush=True)
"""


def program(folder: Path, text: str) -> str:
    path = folder / "of_torchrun.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("backend", ["gloo", "hvlike"])
def test_a_program_of_torchrun_starts_under_mpirun(tmp_path: Path, command: Path, backend: str) -> None:
    # In the tests hvlike is not always installed, and then torch learns of the backend from this.
    text = OF_TORCHRUN.replace("import torch\n", "import torch\nimport hvlike\n", 1)
    job = run_job(command, 2, args=["run", program(tmp_path, text), backend]).check()
    assert sorted(job.stdout.splitlines()) == ["0 2", "1 2"]


def test_modules_and_several_nodes(tmp_path: Path, command: Path) -> None:
    program(tmp_path, OF_TORCHRUN)
    path = os.pathsep.join([str(tmp_path), job_environment({})["PYTHONPATH"]])
    variables = {"HVLIKE_RANKS_PER_NODE": "1", "PYTHONPATH": path}
    job = run_job(command, 2, args=["run", "-m", "of_torchrun", "gloo"], env=variables).check()
    assert job.stdout.splitlines() == ["0 1", "0 1"]


FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise KeyError("of rank 1")
time.sleep(90)
"""


def test_a_rank_that_fails_ends_the_job_and_shows_its_own_frames_alone(tmp_path: Path, command: Path) -> None:
    job = run_job(command, 2, args=["run", program(tmp_path, FAILS)])
    assert job.returncode == 1, job.describe()
    assert job.seconds < 60
    assert "uncaught exception on rank 1 of 2" in job.stderr
    assert job.stderr.count("  File ") == 1, job.stderr


def test_what_is_not_there_is_said_in_one_line(command: Path) -> None:
    job = run_job(command, 1, args=["run", "nothing.py"])
    assert "python -m hvlike run: can't open file" in job.stderr
    assert "Traceback" not in job.stderr

"""dist.init_process_group("hvlike") alone starts a job, however it was launched, and every end of a program is one."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import CHECKOUT, job_environment, run_job

pytestmark = pytest.mark.in_turn(3)

UNMODIFIED = """
import os
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ), "import torch sets none"
assert not [name for name in sys.modules if name.startswith("hvlike.collectives")]

def check():
    dist.init_process_group("hvlike")
    assert dist.get_backend() == "hvlike"
    local_rank = int(os.environ["LOCAL_RANK"])
    assert dist.get_rank() == local_rank == int(os.environ["RANK"])
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]) == ("2", "2", "0")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    store = dist.distributed_c10d._get_default_store()
    assert not store.check([f"mine{local_rank}"]), "a store knows nothing of the one before"
    store.set(f"mine{local_rank}", "here")
    assert store.get(f"mine{1 - local_rank}") == b"here"
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(tensor, group=gloo)
    assert tensor.tolist() == [4.0, 4.0]
    # Children that are forked while all this runs.
    assert sum(len(batch) for batch in DataLoader(range(8), batch_size=2, num_workers=2)) == 8

check()
dist.destroy_process_group()
check()
ending = sys.argv[1]
if ending == "destroyed" or (ending == "destroyed on one rank" and os.environ["RANK"] == "0"):
    dist.destroy_process_group()
if ending == "hvlike first":
    import hvlike
    hvlike.shutdown()
print("well", flush=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with what an installation leaves of setup.cfg's entry points."""
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    root = tmp_path_factory.mktemp("installed")
    folder = root / "hvlike-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hvlike\nVersion: 9\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]{setup['options.entry_points']['torch.backends']}\n")
    return str(root)


def paths(installed: str) -> dict[str, str]:
    """The variable of a job in which hvlike is installed."""
    return {"PYTHONPATH": f"{job_environment({})['PYTHONPATH']}:{installed}"}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("ending", ["destroyed", "destroyed on one rank", "left as it is", "hvlike first"])
def test_an_unmodified_program_under_mpirun(installed: str, ending: str) -> None:
    job = run_job(UNMODIFIED, 2, env=paths(installed), args=[ending]).check()
    assert job.stdout.split() == ["well", "well"]
    assert "Traceback" not in job.stderr, job.describe()


OF_ONE = """
import os
import torch
import torch.distributed as dist
assert "RANK" not in os.environ
dist.init_process_group("hvlike")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(dist.get_rank(), dist.get_world_size(), tensor.item(), os.environ["RANK"], os.environ["LOCAL_RANK"])
dist.destroy_process_group()
# Other backends find what torch documents.
dist.init_process_group("gloo")
dist.all_reduce(tensor)
print(tensor.item())
"""


TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program without mpirun."""
    environment = {
        name: value for name, value in job_environment(variables).items() if name not in TORCHRUNS or name in variables
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_without_a_launcher_it_is_a_job_of_one(installed: str) -> None:
    done = run([sys.executable, "-c", OF_ONE], **paths(installed))
    assert done.stdout.splitlines() == ["0 1 1.0 0 0", "1.0"], done.stderr


GLOO_IF_SEVERAL = """
import os
import torch
import torch.distributed as dist
if sys.argv[1] == "hvlike":
    import hvlike as hvd
    hvd.init()
# What many programs do.
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
tensor = torch.ones(1)
if dist.is_initialized():
    dist.all_reduce(tensor)
    dist.destroy_process_group()
print(tensor.item(), flush=True)
"""


@pytest.mark.parametrize(("first", "total"), [("torch", "1.0"), ("hvlike", "2.0")])
def test_programs_that_look_at_world_size_find_all_or_nothing(installed: str, first: str, total: str) -> None:
    job = run_job("import sys" + GLOO_IF_SEVERAL, 2, env=paths(installed), args=[first]).check()
    assert job.stdout.split() == [total, total]


ALONE = "import torch.distributed as dist; dist.init_process_group('hvlike')"


def test_torchrun_is_refused_on_every_rank(installed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nimport torch.distributed as dist\ntry:\n    dist.init_process_group('hvlike')\n"
        # One write: torchrun has Python write each part of a print by itself, between those of the other process.
        "except RuntimeError as error:\n    os.write(1, f\"{os.environ['RANK']} {error}\\n\".encode())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    # Each is a job of its own for Open MPI, which leaves its file where hvlike refuses to start.
    done = run(command, **paths(installed), OMPI_MCA_btl_sm_backing_directory=str(tmp_path))
    lines = sorted(done.stdout.splitlines())
    assert [line[0] for line in lines] == ["0", "1"], done.stderr
    assert all("torchrun started 2 processes" in line and "mpirun -n 2 python" in line for line in lines)


def test_processes_started_by_hand_are_refused(installed: str) -> None:
    places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run([sys.executable, "-c", ALONE], **paths(installed), **places)
    assert "WORLD_SIZE=2, but MPI has started one process" in done.stderr
    assert "mpirun -n 2 python" in done.stderr


GIVEN = """
import sys
import torch
import torch.distributed as dist
import hvlike as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
store = dist.FileStore(sys.argv[1], size)
for wrong in ({"rank": (rank + 1) % size, "world_size": size}, {"rank": rank, "world_size": size + 1}):
    try:
        dist.init_process_group("hvlike", store=store, **wrong)
        raise SystemExit("accepted")
    except ValueError as error:
        assert "but" in str(error) and "MPI" in str(error) and "Leave out" in str(error), error
dist.init_process_group("hvlike", store=store, rank=rank, world_size=size)
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == size
dist.destroy_process_group()
dist.init_process_group("hvlike", init_method="env://", rank=rank, world_size=size)
dist.barrier()
print("well", flush=True)
"""


def test_rank_size_and_store_may_be_given_and_are_mpis(tmp_path: Path) -> None:
    job = run_job(GIVEN, 2, args=[str(tmp_path / "store")]).check()
    assert job.stdout.split() == ["well", "well"]


LOST = """
import sys, time
import torch.distributed as dist
import hvlike as hvd
dist.init_process_group("hvlike")
leaves = int(sys.argv[1])
if dist.get_rank() == leaves:
    sys.exit(0)
store = dist.distributed_c10d._get_default_store()
began = time.monotonic()
try:
    store.get("never")
except dist.DistNetworkError as error:
    assert time.monotonic() < began + 20
    print(error, flush=True)
"""


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_in_the_store_ends_when_a_rank_leaves(rank: int) -> None:
    job = run_job(LOST, 2, args=[str(rank)])
    assert not job.timed_out, job.describe()
    assert f"MpiStore.get on rank {1 - rank}" in job.stdout, job.describe()
    assert f"rank {rank}" in job.stdout.lower().partition(":")[2]
    assert "never" in job.stdout

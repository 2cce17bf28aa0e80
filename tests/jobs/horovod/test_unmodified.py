"""Programs for Horovod, as they are: `python -m hvlike horovod`, install(), and horovod.run."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.job import CHECKOUT, MODULE, job_environment, run_job

PROGRAMS = CHECKOUT / "tests" / "support" / "horovod"

pytestmark = [pytest.mark.job, pytest.mark.timeout(200)]


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("program", "ranks"), [([str(PROGRAMS / "program.py")], 2), (["-m", "support.horovod.program"], 1)]
)
def test_a_program_finds_what_it_imports_and_touches(program: list[str], ranks: int) -> None:
    path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "tests")])
    arguments = ["horovod", *program, "--epochs", "2"]
    job = run_job(MODULE, ranks, args=arguments, timeout=150, env={"PYTHONPATH": path}).check()
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} of {ranks}: well" for rank in range(ranks)]
    assert job.stderr.count("HVLIKE_GRADIENTS=horovod") == 1


with_lightning = pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs Lightning: pip install hvlike[integrations]"
)


@with_lightning
@pytest.mark.in_turn(1, of=2)
def test_lightning_has_its_strategy_for_horovod_again() -> None:
    job = run_job(MODULE, 2, args=["horovod", str(PROGRAMS / "lightning_program.py")], timeout=150).check()
    well = [line for line in job.stdout.splitlines() if line.endswith("well")]
    assert sorted(well) == [f"rank {rank} of 2: well" for rank in range(2)]


IN_ANY_ORDER = """
import pytorch_lightning, hvlike.horovod
hvlike.horovod.install()
from hvlike.integrations.lightning import HorovodStrategy
from lightning.pytorch import Trainer
assert type(Trainer(strategy="horovod", accelerator="cpu", logger=False).strategy) is HorovodStrategy
assert issubclass(pytorch_lightning.strategies.HorovodStrategy, pytorch_lightning.strategies.ParallelStrategy)
"""


@with_lightning
def test_lightning_may_be_imported_before_install_and_by_hvlike() -> None:
    command = [sys.executable, "-c", IN_ANY_ORDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=job_environment({}))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(find_spec("cloudpickle") is None, reason="a function of the program itself needs cloudpickle")
def test_ranks_of_horovod_run_find_horovod_too() -> None:
    command = [sys.executable, str(PROGRAMS / "launching.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=job_environment({}))
    assert done.stdout.splitlines()[-1:] == ["[(0, 2, 0.5), (1, 2, 0.0)]"], done.stderr

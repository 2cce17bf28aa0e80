"""scripts/gpu_check without a GPU: its parts, and parity tests, pass on a stand-in for one (tests/support/stand_in)."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.job import CHECKOUT, run_job

pytestmark = [pytest.mark.in_turn(1, of=6), pytest.mark.together]

FOLDER = CHECKOUT / "tests" / "support" / "stand_in"
PARITY = (
    "tests/ranks/training/gradients/test_parity.py::test_ranks_together_equal_one_process[AdamW foreach]",
    "tests/ranks/training/optimizer/test_sparse_gradients.py",
    "tests/ranks/collectives/api/test_pinning.py",
)


XPU_PROGRAM = """
import stand_in
import torch, torch.distributed as dist
import hvlike as hvd
hvd.init()
device = hvd.pin_device("xpu")
rank, size = hvd.rank(), hvd.size()
dist.init_process_group("hvlike")
tensor = torch.full((5,), rank + 1.0, device=device)
dist.all_reduce(tensor)
work = dist.broadcast(torch.ones(3, device=device), 0, async_op=True)
work.wait()
if rank == 0:
    dist.send(tensor, 1)
elif rank == 1:
    dist.recv(tensor, 0)
print(rank, tensor.device, tensor.tolist(), hvd.allreduce(tensor, op=hvd.Sum).device)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("stand_in"), "cuda")


def made(folder: Path, kind: str) -> Path:
    sys.path.insert(0, str(FOLDER))
    try:
        from build import build
    finally:
        sys.path.remove(str(FOLDER))
    library = build(folder, kind)
    if isinstance(library, str):
        pytest.skip(f"the stand-in cannot be made: {library}")
    return library


def environment(library: Path, **settings: str) -> dict[str, str]:
    paths = os.pathsep.join([str(FOLDER), str(CHECKOUT)])
    return {"STAND_IN_LIBRARY": str(library), "PYTHONPATH": paths, **settings}


def run_tests(library: Path, tests: Sequence[str], **settings: str) -> str:
    """What pytest says of these tests at 2 ranks."""
    program = f"import stand_in, sys, pytest; sys.exit(pytest.main(['-q', '-x', '-m', 'not job', *{list(tests)!r}]))"
    job = run_job(program, 2, env=environment(library, **settings), timeout=150)
    return job.check().stdout


@pytest.mark.timeout(400)  # It has limits of its own
def test_all_that_needs_no_gpu_passes(library: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(CHECKOUT / "scripts" / "gpu_check"), "--stand-in", str(library), "--minutes", "4"]
    done = subprocess.run(
        command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False
    )
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log
    parts = {each["name"]: each["status"] for each in json.loads((tmp_path / "summary.json").read_text())["parts"]}
    passed = {name for name, status in parts.items() if status == "passed"}
    assert passed == {"end_of_job", "orders", "half_precision", "staged"}
    assert "needs a GPU" not in log


def test_tests_of_the_cpu_pass_with_their_tensors_on_a_gpu(library: Path) -> None:
    said = run_tests(library, PARITY, HVLIKE_TEST_DEVICE="cuda")
    assert " passed" in said


@pytest.mark.timeout(300)
def test_other_accelerators_are_staged_by_streams_and_events_of_torch_accelerator(tmp_path: Path) -> None:
    library = made(tmp_path, "xpu")
    said = run_job(XPU_PROGRAM, 2, env=environment(library), timeout=60).check()
    for rank in range(2):
        assert f"{rank} xpu:{rank} [3.0, 3.0, 3.0, 3.0, 3.0] xpu:{rank}" in said.stdout
    assert "XPU tensors of process set 0: staged backend, as rank 0 has no NCCL (xpu is not CUDA)" in said.stderr

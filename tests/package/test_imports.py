"""`import hvlike` loads what a training loop needs and no more, so that it takes little beside torch's own import."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.pure

NOT_LOADED = {
    # MPI is started by init(); each of the others is an extra, or loads for a tenth of a second and more.
    "mpi4py",
    "cupy",
    "cloudpickle",
    "lightning",
    "matplotlib",
    "tqdm",
    "transformers",
    # What only some programs use.
    "hvlike.autograd",
    "hvlike.bench",
    "hvlike.checkpoint",
    "hvlike.doctor",
    "hvlike.elastic",
    "hvlike.integrations",
    "hvlike.launch",
    "hvlike.nn",
    "hvlike.optim",
    "hvlike.planes.cuda.opening",
    "hvlike.planes.cuda.staged",
    "hvlike.planes.nccl",
    "hvlike.rpc",
    "hvlike.training.autotune",
    "hvlike.training.ddp",
    "hvlike.training.zero",
}
# 199 modules took 72 to 108 ms, half of the runs below 90.
MODULES = 215

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import hvlike
print(*sorted(set(sys.modules) - before))
import gc
assert gc.isenabled()
assert set(hvlike.__all__) <= set(dir(hvlike))
assert not hasattr(hvlike, "no_such_name")
assert hvlike.run is hvlike.run
assert hvlike.run.__module__ == "hvlike.launch.run"
import hvlike.rpc
assert hvlike.rpc is sys.modules["hvlike.rpc"]
assert hvlike.nn.DistributedDataParallel is sys.modules["hvlike.nn"].DistributedDataParallel
"""


def test_what_few_programs_use_is_loaded_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & NOT_LOADED
    assert len([name for name in loaded if name.startswith("hvlike")]) <= MODULES

"""`import hvlike` loads next to nothing, as `import torch` does it; what dir() shows, and what is not there."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

import hvlike

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
    "hvlike.backends.cuda.opening",
    "hvlike.backends.cuda.nccl",
    "hvlike.rpc",
    "hvlike.training.autotune",
    "hvlike.training.ddp",
    "hvlike.training.zero",
}

# 199 modules took 72 to 108 ms, half of the runs below 90.
MODULES = 215
PROGRAM = """
import gc, sys
import torch
before = set(sys.modules)
import hvlike
assert len(set(sys.modules) - before) < 12, set(sys.modules) - before
assert not hasattr(hvlike, "__wrapped__")
assert "hvlike.names" not in sys.modules
hvlike.init
young = sum(len(gc.get_objects(generation=each)) for each in (0, 1))
assert young < 5000, f"{young} objects that came with the import are looked at in the next collection"
assert gc.get_freeze_count() == 0, "nothing is frozen for good"
print(*sorted(set(sys.modules) - before))
assert gc.isenabled()
assert set(hvlike.__all__) <= set(dir(hvlike))
assert not hasattr(hvlike, "no_such_name")
assert hvlike.run is hvlike.run
assert hvlike.run.__module__ == "hvlike.launch.run"
import hvlike.rpc
assert hvlike.rpc is sys.modules["hvlike.rpc"]
assert hvlike.nn.DistributedDataParallel is sys.modules["hvlike.nn"].DistributedDataParallel
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)


def test_what_few_programs_use_is_loaded_when_it_is_used_and_the_next_collection_is_short() -> None:
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & NOT_LOADED
    assert len([name for name in loaded if name.startswith("hvlike")]) <= MODULES


def test_dir_has_the_public_names_and_modules_alone() -> None:
    shown = {name for name in dir(hvlike) if not name.startswith("_")}
    inner = {"errors", "integrations"}
    assert shown == {name for name in hvlike.__all__ if not name.startswith("_")} | inner
    assert hvlike.errors.UsageError is not None
    assert hvlike.integrations.__name__ == "hvlike.integrations"


NAMES = """
import gc
gc.freeze()
frozen = gc.get_freeze_count()
from hvlike.join import Join, join
import hvlike as hvd
assert callable(hvd.join) and hvd.join.Join is Join and hvd.join is join
from hvlike import init
assert hvd.join is join and hvd.init is init
# Some of it is not needed any more.
assert frozen // 2 < gc.get_freeze_count() <= frozen, "what a program has frozen stays so"
hvd.init = 7
assert not hasattr(hvd, "no_such_name")
hvd.size
assert hvd.init == 7
hvd.allredcue
"""


def test_names_stay_what_they_are_and_a_misspelt_one_is_answered_with_the_nearest() -> None:
    """`join` is a function and a module, whatever was imported first; what replaces a name stays."""
    said = run(NAMES).stderr
    assert "module 'hvlike' has no attribute 'allredcue'" in said
    assert "Did you mean: 'allreduce'?" in said


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
from hvlike.integrations import huggingface
assert issubclass(huggingface.HvlikeAccelerator, __import__("accelerate").Accelerator)
try:
    huggingface.HvlikeTrainer(model=None)
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate: pip install hvlike[integrations]")
def test_the_accelerator_needs_no_transformers() -> None:
    done = run(WITHOUT_TRANSFORMERS)
    assert done.stdout.startswith("HvlikeTrainer needs transformers: pip install transformers."), done.stderr

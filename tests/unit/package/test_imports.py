"""`import hvlike` loads next to nothing, as `import torch` does it; what dir() and misspelt names show."""

import subprocess
import sys

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
import sys
import torch
before = set(sys.modules)
import hvlike
assert len(set(sys.modules) - before) < 12, set(sys.modules) - before
assert not hasattr(hvlike, "__wrapped__")
assert "hvlike.names" not in sys.modules
hvlike.init
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


COLLECTIONS = """
import gc, sys
frozen = "frozen" in sys.argv
if frozen:
    gc.freeze()
before = gc.get_freeze_count()
from hvlike import *
if frozen:
    # Some of it is not needed any more.
    assert before // 2 < gc.get_freeze_count() <= before, "what a program has frozen stays so"
else:
    assert gc.get_freeze_count() == before, "nothing is frozen for good"
    print(sum(len(gc.get_objects(generation=each)) for each in (0, 1)))
"""


def test_the_first_collection_after_the_import_does_not_look_at_all_that_came_with_it() -> None:
    young, frozen = (
        subprocess.run([sys.executable, "-c", COLLECTIONS, *argument], capture_output=True, text=True, check=False)
        for argument in ([], ["frozen"])
    )
    assert young.returncode == 0, young.stderr
    # torch makes more than 100 000.
    assert int(young.stdout) < 10_000
    assert frozen.returncode == 0, frozen.stderr


def test_dir_has_the_public_names_and_modules_alone() -> None:
    shown = {name for name in dir(hvlike) if not name.startswith("_")}
    inner = {"errors", "integrations"}
    assert shown == {name for name in hvlike.__all__ if not name.startswith("_")} | inner
    assert hvlike.errors.UsageError is not None
    assert hvlike.integrations.__name__ == "hvlike.integrations"


NAMES = """
from hvlike.join import Join, join
import hvlike as hvd
assert callable(hvd.join) and hvd.join.Join is Join and hvd.join is join
from hvlike import init
assert hvd.join is join and hvd.init is init
hvd.init = 7
assert not hasattr(hvd, "no_such_name")
hvd.size
assert hvd.init == 7
hvd.allredcue
"""


def test_names_stay_what_they_are_and_a_misspelt_one_is_answered_with_the_nearest() -> None:
    """`join` is a function and a module, whatever was imported first; what replaces a name stays."""
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=False, timeout=60)
    assert "module 'hvlike' has no attribute 'allredcue'" in done.stderr
    assert "Did you mean: 'allreduce'?" in done.stderr

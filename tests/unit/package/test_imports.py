"""`import hvlike` loads next to nothing, as `import torch` does it; using a name of it loads what training needs."""

import subprocess
import sys

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


def test_join_is_a_function_and_a_module_whatever_was_imported_first() -> None:
    program = """
from hvlike.join import Join, join
import hvlike as hvd
assert callable(hvd.join) and hvd.join.Join is Join and hvd.join is join
from hvlike import init
assert hvd.join is join and hvd.init is init
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_replaces_a_name_stays() -> None:
    program = """
import hvlike
hvlike.init = 7
assert not hasattr(hvlike, "no_such_name")
hvlike.size
assert hvlike.init == 7
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

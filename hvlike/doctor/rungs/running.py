"""hvlike itself: whether it starts, and what a reduction takes."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, Remark, conclude, fail, ok, skip, warn
from hvlike.doctor.probe import Gap
from hvlike.doctor.rungs.wording import by_value, in_bytes, in_seconds
from hvlike.doctor.timing import Row, Timing, Timings

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
        found += [f"{timing.way.plane}, {len(timing.way.ranks)} ranks, {describe(row)}" for row in timing.rows]
        if timing.reason:
            found.append(f"{timing.way.plane}: {timing.reason}")
        remarks += _judge(timing, timings)
    found.append(f"a copy of {in_bytes(timings.timings[0].rows[-1].nbytes)} in memory: {in_seconds(timings.copy)}")
    return conclude(found, remarks) if remarks else ok(*found)


def describe(row: Row) -> str:
    """Size, median and spread."""
    return f"{in_bytes(row.nbytes)}: {in_seconds(row.median)} [{in_seconds(row.low)} to {in_seconds(row.high)}]"


def _judge(timing: Timing, timings: Timings) -> list[Remark]:
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

"""Clocks and filesystems."""

from __future__ import annotations

from hvlike.doctor.case import Case, known
from hvlike.doctor.facts.files import Folder
from hvlike.doctor.finding import Finding, Remark, conclude, fail, ok, warn
from hvlike.doctor.probe import Gap
from hvlike.doctor.rungs.wording import in_bytes, of_every_rank

EARLIEST = 1_735_689_600
"""The first of January 2025: a clock that says less was never set."""

APART = 1.0
"""Seconds between the wall clocks of two hosts."""

_LITTLE = 64 << 20
_LONG = 80
"""Characters: sockets below it have at most 108."""


def judge_clock(case: Case) -> Finding:
    """The wall clocks of the hosts, and the clock that times are measured with."""
    files = known(case.me.files)
    remarks = []
    if files.wall_time < EARLIEST:
        text = "the clock of this machine was never set"
        remarks.append(fail(text, "Set it (`timedatectl set-ntp true`): certificates and file times go wrong."))
    if files.backwards:
        remarks.append(fail("the monotonic clock went backwards", "Look at the virtual machine's clock source."))
    meeting = case.job.meeting
    found = ["the monotonic clock goes forward"]
    if meeting is not None and not isinstance(meeting, Gap) and len(meeting.nodes) > 1:
        firsts = [meeting.wall_times[node[0]] for node in meeting.nodes]
        apart = max(firsts) - min(firsts)
        found.append(f"the wall clocks of {len(firsts)} nodes are at most {apart:.3f} s apart")
        if apart > APART:
            text = f"the wall clocks are {apart:.1f} s apart"
            remarks.append(warn(text, "Run NTP or chrony on every host: timelines of several nodes do not fit else."))
    return conclude(found, remarks) if remarks else ok(*found)


def judge_filesystems(case: Case) -> Finding:
    """The places that a job writes to, on every rank."""
    found, remarks = [], []
    for folder in known(case.me.files).folders:
        free = "" if folder.free is None else f", {in_bytes(folder.free)} free"
        found.append(f"{folder.purpose}: {folder.path} ({folder.kind or 'unknown kind'}{free})")
    for rank, files in of_every_rank(case, lambda each: each.files):
        for folder in files.folders:
            remarks += _judge(folder.purpose == "temporary files", folder, f"rank {rank} on {case.ranks[rank].host}")
    return conclude(found, remarks)


def _judge(temporary: bool, folder: Folder, where: str) -> list[Remark]:
    place = f"{where}: {folder.path}"
    if folder.wrong is not None:
        if temporary:
            advice = "MPI and Python need a place for temporary files: set TMPDIR to a writable one."
            return [fail(f"{place} cannot be written: {folder.wrong}", advice)]
        advice = "Checkpoints and timelines need another path than a relative one, or start the job elsewhere."
        return [warn(f"{place} cannot be written: {folder.wrong}", advice)]
    remarks = []
    if folder.free is not None and folder.free < _LITTLE:
        text = f"{place} has {in_bytes(folder.free)} left"
        remarks.append((fail if temporary and not folder.free else warn)(text, "Make room there, or set TMPDIR."))
    if temporary and folder.network:
        text = f"{place} is a network filesystem ({folder.kind})"
        remarks.append(warn(text, "MPI puts its sockets and segments there: set TMPDIR to a local disk."))
    if temporary and len(folder.path) > _LONG:
        text = f"{place} is {len(folder.path)} characters long"
        remarks.append(warn(text, "The paths of sockets may have 108 characters: set TMPDIR=/tmp."))
    return remarks

"""Where the ranks are."""

from __future__ import annotations

from hvlike.collectives.agreement import name_ranks
from hvlike.doctor.case import Case, known
from hvlike.doctor.finding import Finding, conclude, skip, warn


def judge(case: Case) -> Finding:
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

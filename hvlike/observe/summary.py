"""Where the time of a job went, as text: the tables that `timeline summary` prints."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.observe.operations import Calls, Operations, calls, operations
from hvlike.observe.spans import RankTrace
from hvlike.observe.steps import Parts, RankSteps, Training, trainings

_MOST_CALLS = 20
_MOST_RANKS = 64


def summary(traces: Sequence[RankTrace]) -> str:
    """The tables of all steps, named operations and remote calls in these timelines."""
    parts = [_training(each) for each in trainings(traces)]
    named = operations(traces)
    if named:
        parts.append(_operations(named))
    remote = calls(traces)
    if remote:
        parts.append(_calls(remote))
    return "\n\n".join(parts) or "These timelines hold neither steps, nor named operations, nor remote calls."


def _training(training: Training) -> str:
    ranks = sorted(training.ranks, key=lambda each: each.rank)
    steps = max(len(each.steps) for each in ranks)
    where = f" in process set {training.process_set}" if training.process_set else ""
    lines = [f"{steps} steps of {training.name}{where}; milliseconds per step, on average:", ""]
    hosts = max(len("host"), *(len(each.host) for each in ranks))
    lines.append(f"  rank  {'host':{hosts}}      step   compute   wait: others   wait: reduction   (hidden reduction)")
    lines += [_line(each, hosts) for each in ranks[:_MOST_RANKS]]
    if len(ranks) > _MOST_RANKS:
        lines.append(f"  ... and {len(ranks) - _MOST_RANKS} ranks more")
    lines.append("")
    lines.append(_shares([each.mean for each in ranks]))
    lines += _oddities(training)
    return "\n".join(lines)


def _line(rank: RankSteps, hosts: int) -> str:
    mean = rank.mean
    return (
        f"  {rank.rank:4}  {rank.host:{hosts}}  {mean.step:8.2f}  {mean.compute:8.2f}  {mean.others:13.2f}  "
        f"{mean.reduction:16.2f}  {mean.hidden:19.2f}"
    )


def _shares(means: Sequence[Parts]) -> str:
    whole = sum(each.step for each in means) or 1.0
    named = {
        "compute and all else": sum(each.compute for each in means),
        "waiting for other ranks": sum(each.others for each in means),
        "reduction that nothing hides": sum(each.reduction for each in means),
    }
    return "  " + ", ".join(f"{what} {100 * value / whole:.0f} %" for what, value in named.items())


def _oddities(training: Training) -> list[str]:
    """Who the others wait for, and the step that took longest."""
    lines = []
    if training.last_to_come:
        rank, times = training.last_to_come.most_common(1)[0]
        lines.append(f"  last to come: rank {rank}, in {times} of {training.last_to_come.total()} steps")
    length, key, rank = max(
        (parts.step, key, each.rank) for each in training.ranks for key, parts in each.steps.items()
    )
    parts = next(each for each in training.ranks if each.rank == rank).steps[key]
    lines.append(
        f"  longest step: number {key[1]} on rank {rank}, {length:.2f} ms: compute {parts.compute:.2f}, others "
        f"{parts.others:.2f}, reduction {parts.reduction:.2f}"
    )
    return lines


def _operations(named: Sequence[Operations]) -> str:
    lines = ["Named operations of all ranks; milliseconds, on average:", ""]
    lines.append("  kind             count         bytes   until all asked   (longest)     queue   execution")
    lines += [
        f"  {each.kind:14} {each.count:7} {each.bytes:13}  {each.agreement:16.3f}  {each.longest_agreement:10.3f}  "
        f"{each.queue:8.3f}  {each.execution:10.3f}"
        for each in named
    ]
    return "\n".join(lines)


def _calls(remote: Sequence[Calls]) -> str:
    lines = ["Remote calls of all ranks; milliseconds:", ""]
    lines.append("  what    count       mean    longest  function")
    lines += [
        f"  {each.what:6} {each.count:6}  {each.mean:9.3f}  {each.longest:9.3f}  {each.function}"
        for each in remote[:_MOST_CALLS]
    ]
    if len(remote) > _MOST_CALLS:
        lines.append(f"  ... and {len(remote) - _MOST_CALLS} more")
    return "\n".join(lines)

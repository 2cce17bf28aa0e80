"""python -m hvlike timeline: merge the files of ranks, or print the tables of where the time went."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hvlike.errors import UsageError
from hvlike.observe.pictures import draw_steps, png
from hvlike.observe.timelines import (
    Calls,
    Operations,
    Parts,
    RankSteps,
    RankTrace,
    Training,
    abouts,
    calls,
    merge,
    operations,
    rank_traces,
    read_all,
    trainings,
)

_MOST_CALLS = 20
_MOST_RANKS = 64


def summary(traces: Sequence[RankTrace]) -> str:
    """Return the tables of all steps, named operations and remote calls in these timelines."""
    named, remote = operations(traces), calls(traces)
    parts = [*map(_training, trainings(traces)), *([_operations(named)] if named else [])]
    parts += [_calls(remote)] if remote else []
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
    return "\n".join([*lines, "", _shares([each.mean for each in ranks]), *_oddities(training)])


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
    """Name the rank that the others wait for, and the longest step."""
    lines = []
    if training.last_to_come:
        rank, times = training.last_to_come.most_common(1)[0]
        lines.append(f"  last to come: rank {rank}, in {times} of {training.last_to_come.total()} steps")
    steps = ((parts, key, each.rank) for each in training.ranks for key, parts in each.steps.items())
    parts, key, rank = max(steps, key=lambda each: (each[0].step, *each[1:]))
    lines.append(
        f"  longest step: number {key[1]} on rank {rank}, {parts.step:.2f} ms: compute {parts.compute:.2f}, others "
        f"{parts.others:.2f}, reduction {parts.reduction:.2f}"
    )
    return lines


def _operations(named: Sequence[Operations]) -> str:
    head = "  kind             count         bytes   until all asked   (longest)     queue   execution"
    lines = [
        f"  {each.kind:14} {each.count:7} {each.bytes:13}  {each.agreement:16.3f}  {each.longest_agreement:10.3f}  "
        f"{each.queue:8.3f}  {each.execution:10.3f}"
        for each in named
    ]
    return "\n".join(["Named operations of all ranks; milliseconds, on average:", "", head, *lines])


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


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status: 1 for files that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m hvlike timeline", description="Work with timelines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merging = commands.add_parser("merge", help="join the files of all ranks into one, which Perfetto opens")
    merging.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    merging.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="IN",
        help="files of ranks, complete or cut off; of one rank: also the others beside it",
    )
    merging.add_argument("-f", "--force", action="store_true", help="overwrite OUT")
    merging.set_defaults(run=_merge)
    telling = commands.add_parser("summary", help="print where the time of steps, operations and remote calls went")
    telling.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of ranks, or a merged one; of one rank: also the others beside it",
    )
    telling.add_argument("--plot", type=png, metavar="FILE.png", help="draw the steps; needs matplotlib")
    telling.set_defaults(run=_summarise)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (UsageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return status


def _merge(options: argparse.Namespace) -> int:
    if options.out.exists() and not options.force:
        # Easily a file of a rank, when OUT was forgotten.
        print(f"{options.out} exists already: name a new file first, or pass --force", file=sys.stderr)
        return 1
    trace = merge(options.files)
    options.out.write_text(json.dumps(trace))
    print(f"{options.out}: {len(trace['traceEvents'])} events of {len(trace['otherData']['ranks'])} ranks")
    return 0


def _summarise(options: argparse.Namespace) -> int:
    files = read_all(options.files)
    traces = rank_traces(files)
    print(summary(traces))
    size = max((about.get("size", 1) for each in files for about in abouts(each)), default=1)
    absent = sorted({*range(size)} - {each.rank for each in traces})
    if absent:
        listed = ", ".join(map(str, absent[:_MOST_CALLS])) + (", ..." if len(absent) > _MOST_CALLS else "")
        print(f"\nMissing, of {size} ranks: the timelines of {listed}.", file=sys.stderr)
    if options.plot is not None:
        found = trainings(traces)
        if not found:
            print("no picture: there are no steps of an optimizer or a wrapped model in it", file=sys.stderr)
            return 1
        draw_steps(options.plot, found[0])
        print(f"\n{options.plot}: the steps of {found[0].name}")
    return 0

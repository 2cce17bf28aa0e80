"""python -m hvlike timeline: what can be done with timelines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hvlike.errors import UsageError
from hvlike.observe.merging import merge, read_all
from hvlike.observe.picture import png
from hvlike.observe.spans import rank_traces
from hvlike.observe.step_picture import draw_steps
from hvlike.observe.steps import trainings
from hvlike.observe.summary import summary


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, or 1 for files that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m hvlike timeline", description="Work with timelines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merging = commands.add_parser("merge", help="join the files of all ranks into one, which Perfetto opens")
    merging.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    merging.add_argument("files", type=Path, nargs="+", metavar="IN", help="files of ranks, also such as were cut off")
    merging.add_argument("-f", "--force", action="store_true", help="write OUT although it exists")
    merging.set_defaults(run=_merge)
    telling = commands.add_parser("summary", help="print where the time of steps, operations and remote calls went")
    telling.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files of ranks, or a merged one")
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
    print(f"{options.out}: {len(trace['traceEvents'])} events of {len(options.files)} ranks")
    return 0


def _summarise(options: argparse.Namespace) -> int:
    traces = rank_traces(read_all(options.files))
    print(summary(traces))
    if options.plot is not None:
        found = trainings(traces)
        if not found:
            print("no picture: there are no steps of an optimizer or a wrapped model in it", file=sys.stderr)
            return 1
        draw_steps(options.plot, found[0])
        print(f"\n{options.plot}: the steps of {found[0].name}")
    return 0

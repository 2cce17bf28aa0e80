"""python -m hvlike timeline: what can be done with timelines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hvlike.errors import UsageError
from hvlike.observe.merging import merge


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, or 1 for files that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m hvlike timeline", description="Work with timelines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merging = commands.add_parser("merge", help="join the files of all ranks into one, which Perfetto opens")
    merging.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    merging.add_argument("files", type=Path, nargs="+", metavar="IN", help="files of ranks, also such as were cut off")
    merging.add_argument("-f", "--force", action="store_true", help="write OUT although it exists")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.force:
        # Easily a file of a rank, when OUT was forgotten.
        print(f"{options.out} exists already: name a new file first, or pass --force", file=sys.stderr)
        return 1
    try:
        trace = merge(options.files)
        options.out.write_text(json.dumps(trace))
    except (UsageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {len(trace['traceEvents'])} events of {len(options.files)} ranks")
    return 0

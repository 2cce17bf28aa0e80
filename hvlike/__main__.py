"""Command line: python -m hvlike COMMAND ...; every command is a module with main(arguments) -> exit status."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command lives and what it is for."""

    module: str
    purpose: str


COMMANDS = {
    "doctor": Command("hvlike.doctor.command", "find out why jobs do not start or not well; also mpirun -n 2 ..."),
    "bench": Command("hvlike.bench.command", "measure on this machine: mpirun -n 2 python -m hvlike bench allreduce"),
    "timeline": Command("hvlike.observe.command", "join and sum up timelines: timeline summary FILE..."),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:10}{command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: python -m hvlike COMMAND [-h] ...", "", *lines])


def main(arguments: list[str]) -> int:
    """Run the command named first; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"python -m hvlike: no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(COMMANDS[name].module).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

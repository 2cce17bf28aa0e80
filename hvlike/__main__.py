"""Command line: python -m hvlike COMMAND ...; every command is a module with main(arguments) -> exit status."""

from __future__ import annotations

import importlib
import sys

from hvlike.torch_distributed.autoload import register
from hvlike.version import __version__

# Where each command lives and what it is for.
COMMANDS = {
    "doctor": ("hvlike.doctor.command", "find out why a job fails or is slow; also mpirun -n 2 ..."),
    "bench": ("hvlike.bench.command", "measure on this machine: mpirun -n 2 python -m hvlike bench allreduce"),
    "horovod": ("hvlike.horovod.command", "run a program that imports horovod: mpirun -n 4 ... horovod train.py"),
    "run": ("hvlike.launch.torch_program", "run a program of torch.distributed: mpirun -n 4 ... run train.py"),
    "launch": ("hvlike.launch.command", "start a job again after failures: launch -- mpirun -n 4 python train.py"),
    "timeline": ("hvlike.observe.command", "merge and summarize timelines: timeline summary FILE..."),
}
# A launcher has to answer signals from the start, and the import of torch takes seconds. Of a program that is run, the
# import of torch is its own, after MPI has started and the program has set what torch reads.
WITHOUT_TORCH = ("run", "launch", "timeline")


def usage() -> str:
    lines = [f"  {name:10}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: python -m hvlike COMMAND [-h] ...", "       python -m hvlike --version", "", *lines])


def main(arguments: list[str]) -> int:
    """Run the command named first; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"hvlike {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"python -m hvlike: no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    if name not in WITHOUT_TORCH:
        register()
    status: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return status


def console() -> int:
    """What the script `hvlike` runs; returns the exit status."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

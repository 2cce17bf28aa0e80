"""What benchmarks share: options, and the conditions of a run.

Figures without their conditions say nothing, so each report starts with them.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

import hvlike
from hvlike.collectives.session.context import current
from hvlike.observe.pictures import png
from hvlike.transport.host.mpi_library import library_name

Known = TypeVar("Known")


def add_common(parser: argparse.ArgumentParser, repetitions: str, *without: str) -> None:
    """Add what all have, and options to leave out each contestant of `without`. repetitions: the default in words."""
    parser.add_argument("--repetitions", type=positive, help=f"default: {repetitions}")
    for name in without:
        # The value is the reason that reports give.
        option = f"--no-{name.lower()}"
        parser.add_argument(option, action="store_const", const=f"left out by {option}", help=f"leave {name} out")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices; default 0")
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", type=png, metavar="FILE.png", help="draw the results; needs matplotlib")


def add_bare_and_device(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --bare and --device. what: is measured on the device."""
    parser.add_argument("--bare", action="store_true", help="compare with a bare loop of numpy calls; two ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"where {what} is; default cpu")


def positive(text: str) -> int:
    """Return a whole number above 0. Raises: argparse.ArgumentTypeError."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def choice_of(known: Mapping[str, Known], kind: str) -> Callable[[str], list[Known]]:
    """Return a type for argparse: names separated by commas, of those that are known."""

    def parse(text: str) -> list[Known]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {kind} {name!r}; there are {', '.join(known)}")
        return [known[name] for name in text.split(",")]

    return parse


def settle(device: torch.device) -> None:
    """Wait until the device has done what this process has asked of it."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def describe(benchmark: str) -> dict[str, Any]:
    """Return what was measured with what; hvlike is initialised."""
    library = library_name(current().world.mpi)
    return {
        "benchmark": benchmark,
        "ranks": hvlike.size(),
        "nodes": hvlike.size() // hvlike.local_size() if hvlike.is_homogeneous() else "uneven",
        "cores": len(os.sched_getaffinity(0)),
        "hvlike": hvlike.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "mpi": " ".join(library.partition(",")[0].split()),
    }


def heading(conditions: dict[str, Any]) -> str:
    horovod = f", Horovod {conditions['horovod']}" if conditions.get("horovod") else ""
    gpus = ""
    if "gpus" in conditions:
        gpus = f"{conditions['gpus']} x {conditions['device']}, {conditions['ranks_per_gpu']} rank(s) on each\n"
    return (
        f"{gpus}{conditions['ranks']} ranks on {conditions['nodes']} node(s), {conditions['cores']} cores for rank 0, "
        f"{conditions['torch_threads']} thread(s) each\n"
        f"hvlike {conditions['hvlike']}, torch {conditions['torch']}, "
        f"Python {conditions['python']}, {conditions['mpi']}{horovod}"
    )

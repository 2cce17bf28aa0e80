"""In which jobs a benchmark runs: one of two ranks, or those that it starts, each of which returns one answer."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import hvlike
from hvlike.errors import LaunchError, UsageError
from hvlike.launch.run import run
from hvlike.transport.host.launchers import detect_launcher

T = TypeVar("T")


def runs_on_two_ranks(benchmark: str) -> bool:
    """Start hvlike, and return whether there are two ranks. If not, print that on rank 0 and end hvlike. Collective."""
    hvlike.init()
    if hvlike.size() == 2:
        return True
    if hvlike.rank() == 0:
        print(f"bench {benchmark} is for two ranks: mpirun -n 2 scripts/bench {benchmark}", file=sys.stderr)
    hvlike.shutdown()
    return False


def refuse_inside_a_job(environment: Mapping[str, str], benchmark: str) -> None:
    """Raise UsageError when this process is a rank already."""
    launcher = detect_launcher(environment)
    if launcher is not None:
        raise UsageError(
            f"bench {benchmark} starts its jobs itself, and this process is a rank of a job of {launcher.name} "
            f"({launcher.variable}={launcher.size}): run `scripts/bench {benchmark}` without mpirun."
        )


def outside_of_jobs(measure: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """Return how a benchmark runs that starts its jobs itself: an error is printed, and is its exit status, 1 or 2."""

    def run_and_report(options: argparse.Namespace) -> int:
        try:
            measure(options)
        except (LaunchError, UsageError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1
        return 0

    return run_and_report


def run_job(
    function: Callable[..., T], arguments: Sequence[Any], ranks: int, settings: Mapping[str, str], seconds: float
) -> T:
    """Call a function on every rank of a job of its own, and return what it returns on rank 0. Blocks.

    settings: variables to add to the environment. Raises: LaunchError, for a job that fails or takes more than these
    seconds.
    """
    # What ranks print is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return run(function, arguments, np=ranks, env={"OMP_NUM_THREADS": "1", **settings}, timeout=seconds)[0]
        except UsageError as error:
            # It is not this command that was wrong.
            raise LaunchError(str(error)) from error

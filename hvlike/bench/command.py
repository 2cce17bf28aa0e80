"""python -m hvlike bench BENCHMARK: choose a benchmark, run it on all ranks, print on rank 0."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import ModuleType

from hvlike.bench import allreduce, step

BENCHMARKS: Mapping[str, ModuleType] = {"allreduce": allreduce, "step": step}
"""Each has a PURPOSE, add_arguments(parser), and run(options), which returns the exit status, on every rank."""


def main(
    arguments: list[str],
    benchmarks: Mapping[str, ModuleType] = BENCHMARKS,
    program: str = "python -m hvlike bench",
) -> int:
    """Run one benchmark and return the exit status. Collective: the same arguments on every rank."""
    parser = argparse.ArgumentParser(prog=program)
    choices = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in benchmarks.items():
        benchmark.add_arguments(choices.add_parser(name, help=benchmark.PURPOSE, description=benchmark.PURPOSE))
    options = parser.parse_args(arguments)
    status: int = benchmarks[options.benchmark].run(options)
    return status

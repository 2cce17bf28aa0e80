"""python -m hvlike bench BENCHMARK: choose a benchmark, run it on all ranks, print on rank 0."""

from __future__ import annotations

import argparse

from hvlike.bench import allreduce, autograd, backend, kernels, recovery, rpc, scaling, simulate, step, waiting, zero

_ALL = (allreduce, step, backend, scaling, simulate, waiting, kernels, rpc, autograd, zero, recovery)
BENCHMARKS = {each.__name__.rpartition(".")[2]: each for each in _ALL}
"""Each has a PURPOSE, add_arguments(parser), and run(options), which returns the exit status, on every rank."""


def main(arguments: list[str]) -> int:
    """Run one benchmark and return the exit status. Collective: the same arguments on every rank."""
    parser = argparse.ArgumentParser(prog="python -m hvlike bench")
    choices = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(choices.add_parser(name, help=benchmark.PURPOSE, description=benchmark.PURPOSE))
    options = parser.parse_args(arguments)
    status: int = BENCHMARKS[options.benchmark].run(options)
    return status

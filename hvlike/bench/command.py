"""python -m hvlike bench BENCHMARK: choose a benchmark, run it on all ranks, print on rank 0."""

from __future__ import annotations

import argparse

from hvlike.bench import allreduce, autograd, backend, kernels, recovery, rpc, scaling, simulate, step, waiting, zero
from hvlike.bench.harness.benchmark import Benchmark

_ALL = (allreduce, step, backend, scaling, simulate, waiting, kernels, rpc, autograd, zero, recovery)
BENCHMARKS: dict[str, Benchmark] = {each.BENCHMARK.name: each.BENCHMARK for each in _ALL}


def main(arguments: list[str]) -> int:
    """Run one benchmark and return the exit status. Collective: the same arguments on every rank."""
    parser = argparse.ArgumentParser(prog="python -m hvlike bench")
    choices = parser.add_subparsers(dest="benchmark", required=True)
    for benchmark in BENCHMARKS.values():
        choice = choices.add_parser(benchmark.name, help=benchmark.purpose, description=benchmark.purpose)
        benchmark.add_arguments(choice)
    options = parser.parse_args(arguments)
    return BENCHMARKS[options.benchmark].run(options)

"""scripts/bench BENCHMARK: choose a benchmark, run it on all ranks, print on rank 0."""

from __future__ import annotations

import sys

from benchmarks import autograd, backend, kernels, recovery, rpc, scaling, simulate, waiting, zero
from hvlike.bench import command

_ALL = (backend, rpc, autograd, zero, kernels, scaling, simulate, waiting, recovery)
BENCHMARKS = {**{each.__name__.rpartition(".")[2]: each for each in _ALL}, **command.BENCHMARKS}
"""Those of `python -m hvlike bench`, too."""

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:], BENCHMARKS, "scripts/bench"))

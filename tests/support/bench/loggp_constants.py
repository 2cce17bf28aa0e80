"""Round constants and a workload for tests of the LogGP model."""

from benchmarks.loggp import Constants, Workload

CONSTANTS = Constants(
    latency=2e-6,
    overhead=0.5e-6,
    gap=1e-6,
    gap_per_byte=1e-10,
    fold=1e-10,
    memory=2e-10,
    memory_floor=1e-5,
    take=1e-5,
    take_entry=1e-6,
    tell=2e-5,
    tell_entry=2e-6,
    entry_bytes=50.0,
)
WORK = Workload(nbytes=1e8, tensors=100, compute=0.1)

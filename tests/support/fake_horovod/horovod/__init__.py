"""Stands in for Horovod in tests of the benchmarks."""

__version__ = "0.0.fake"

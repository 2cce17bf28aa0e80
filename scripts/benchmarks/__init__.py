"""Benchmarks for hvlike's developers: what it costs, by its parts. Those for users are in hvlike.bench."""

"""What all benchmarks share: comparison, conditions, processes, reports."""

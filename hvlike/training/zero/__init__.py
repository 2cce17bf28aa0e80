"""ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters and updates those."""

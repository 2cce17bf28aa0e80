"""DistributedOptimizer: a torch optimizer that steps on reduced gradients."""

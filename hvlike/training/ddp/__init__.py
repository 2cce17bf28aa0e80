"""DistributedDataParallel: a module whose gradients are reduced over the ranks when backward ends."""

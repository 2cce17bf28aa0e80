"""Reductions of flat pieces of tensors, element by element, on one rank."""

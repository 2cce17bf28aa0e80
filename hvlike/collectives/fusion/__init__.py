"""Buckets of tensors that are reduced together, in the order of an agreed plan."""

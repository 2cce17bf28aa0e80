"""Tensors of a GPU: what is asked of the device, and the planes that take its tensors as they are."""

"""Tensors of GPUs in messages: which device they go to, and what waits for what."""

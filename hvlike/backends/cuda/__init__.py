"""Collectives of tensors on a GPU: NCCL, or staged through pinned host memory."""

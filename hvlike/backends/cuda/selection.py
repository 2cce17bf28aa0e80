"""Which backend serves the CUDA tensors of a process set, and why. Pure functions of what the ranks report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvlike.errors import LaunchError

NCCL, STAGED, SOLO = "nccl", "staged", "solo"
"""Backends of a device. HVLIKE_CUDA_PLANE may ask for one of the first two."""


class DeviceFacts(NamedTuple):
    host: str
    gpu: str
    nccl: int  # Version of NCCL; 0 where it cannot be used
    missing: str


class Choice(NamedTuple):
    backend: str
    reason: str


def choose_backend(facts: Sequence[DeviceFacts], ranks: Sequence[int], wanted: str) -> Choice:
    """The backend of a process set, the same on every rank; ranks: their numbers in the world. wanted:
    HVLIKE_CUDA_PLANE. Raises: LaunchError where it cannot serve, with the reason and what to do.
    """
    obstacle = why_not_nccl(facts, ranks)
    if wanted == NCCL:
        if obstacle:
            raise LaunchError(
                f"HVLIKE_CUDA_PLANE=nccl, but {obstacle}. Unset it: tensors then travel through host memory."
            )
        return Choice(NCCL, "HVLIKE_CUDA_PLANE=nccl")
    if len(facts) == 1:
        return Choice(SOLO, "the rank is alone")
    if wanted == STAGED:
        return Choice(STAGED, "HVLIKE_CUDA_PLANE=staged")
    return Choice(STAGED, obstacle) if obstacle else Choice(NCCL, "every rank has a GPU of its own and NCCL")


def why_not_nccl(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    for rank, each in zip(ranks, facts, strict=True):
        if not each.nccl:
            return f"rank {rank} has no NCCL ({each.missing})"
    first: dict[tuple[str, str], int] = {}
    for rank, each in zip(ranks, facts, strict=True):
        other = first.setdefault((each.host, each.gpu), rank)
        if other != rank:
            gpus = len({gpu for host, gpu in first if host == each.host})
            here = sum(fact.host == each.host for fact in facts)
            return (
                f"ranks {other} and {rank} on {each.host} share the GPU {each.gpu} ({here} ranks use {gpus} of its "
                "GPUs), and NCCL needs one for each: call torch.cuda.set_device(hvd.local_rank()) first, or start "
                "fewer ranks"
            )
    versions = {each.nccl: rank for rank, each in zip(ranks, facts, strict=True)}
    if len(versions) > 1:
        reported = ", ".join(f"{version} on rank {rank}" for version, rank in sorted(versions.items()))
        return f"the ranks have different versions of NCCL ({reported})"
    return ""

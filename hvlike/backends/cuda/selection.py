"""Which backend serves the CUDA tensors of a process set, and why. Pure functions of what the ranks report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvlike.errors import LaunchError

AUTO, NCCL, MPI, IPC, STAGED = "auto", "nccl", "mpi", "ipc", "staged"
"""What HVLIKE_CUDA_PLANE may say."""


class DeviceFacts(NamedTuple):
    """What one rank says of its device."""

    host: str
    gpu: str
    """What no other GPU of the host is called."""
    nccl: int
    """Version of NCCL; 0 where it cannot be used."""
    missing: str
    """Why it cannot."""
    no_mpi: str = "HVLIKE_CUDA_AWARE_MPI=1 is not set"
    """Why MPI is not to be given memory of a GPU; empty where that may be tried."""


class Choice(NamedTuple):
    """A plane, and what is said about it."""

    plane: str
    """solo, nccl, mpi, ipc or staged."""
    reason: str


def choose_backend(facts: Sequence[DeviceFacts], ranks: Sequence[int], wanted: str) -> Choice:
    """The plane of a process set; the same on every rank.

    facts: of each member, in order; ranks: what they are called. wanted: HVLIKE_CUDA_PLANE.
    Raises: LaunchError where the plane that is wanted cannot serve; the text says why and what to do.
    """
    if wanted == NCCL:
        obstacle = why_not_nccl(facts, ranks)
        if obstacle:
            raise LaunchError(
                f"HVLIKE_CUDA_PLANE=nccl, but {obstacle}. Unset it: tensors then travel through host memory."
            )
        return Choice(NCCL, "HVLIKE_CUDA_PLANE=nccl")
    if wanted == MPI and (obstacle := why_not_mpi(facts, ranks)):
        raise LaunchError(f"HVLIKE_CUDA_PLANE=mpi, but {obstacle}. Unset it: tensors then travel through host memory.")
    hosts = sorted({each.host for each in facts})
    if wanted == IPC and len(hosts) > 1:
        raise LaunchError(
            f"HVLIKE_CUDA_PLANE=ipc is for the ranks of one host, and these are on {', '.join(hosts[:4])}. Unset it."
        )
    if len(facts) == 1:
        return Choice("solo", "the rank is alone")
    if wanted == MPI:
        return Choice(MPI, "HVLIKE_CUDA_PLANE=mpi")
    if wanted == IPC:
        return Choice(IPC, "HVLIKE_CUDA_PLANE=ipc")
    if wanted == STAGED:
        return Choice(STAGED, "HVLIKE_CUDA_PLANE=staged")
    obstacle = why_not_nccl(facts, ranks)
    if not obstacle:
        return Choice(NCCL, "every rank has a GPU of its own and NCCL")
    if not why_not_mpi(facts, ranks):
        return Choice(MPI, f"HVLIKE_CUDA_AWARE_MPI=1 and {obstacle}")
    return Choice(STAGED, obstacle)


def why_not_mpi(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    """Why MPI is not to be given memory of a GPU; empty if that may be tried."""
    said = [f"on rank {rank} {each.no_mpi}" for rank, each in zip(ranks, facts, strict=True) if each.no_mpi]
    return said[0] if said else ""


def why_not_nccl(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    """Why NCCL cannot serve; empty if it can."""
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
        said = ", ".join(f"{version} on rank {rank}" for version, rank in sorted(versions.items()))
        return f"the ranks have different versions of NCCL ({said})"
    return ""

"""Which GPU is a rank's own."""

from __future__ import annotations

import torch

from hvlike.collectives.lifecycle import local_rank
from hvlike.errors import LaunchError, UsageError


def pin_device(kind: str = "cuda") -> torch.device:
    """Make one GPU the current one of this rank, chosen by its local rank, and return it. Local; needs init().

    kind: "cuda"; "cpu" returns the CPU and changes nothing, for programs that leave the choice to their user.
    The GPUs that this process sees are dealt in turn: where a node has more ranks than GPUs, several share one. A rank
    that sees a single GPU, because its launcher has set CUDA_VISIBLE_DEVICES, gets that. To be called before anything
    is put on a GPU: what comes first would be in the memory of GPU 0, on every rank.
    Returns a torch.device with its number. Raises: NotInitializedError; UsageError for another kind; LaunchError where
    this process sees no GPU.
    Source: torch.cuda.set_device(hvd.local_rank()), as Horovod's examples have it.
    """
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"pin_device: kind must be 'cuda' or 'cpu', got {kind!r}.")
    number = local_rank()
    if kind == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if not gpus:
        raise LaunchError(
            f"pin_device: local rank {number} sees no GPU: {_reason()}. Check CUDA_VISIBLE_DEVICES and nvidia-smi on "
            "this host, or run on the CPU (pin_device('cpu'))."
        )
    device = torch.device("cuda", device_index(number, gpus))
    torch.cuda.set_device(device)
    return device


def device_index(local_rank: int, gpus: int) -> int:
    """The number of the GPU of a local rank among those that it sees: 0, 1, 2, 0, 1, ... Pure function."""
    return local_rank % gpus


def _reason() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch was built for CUDA {torch.version.cuda}, but finds no device"

"""Measuring on a GPU: what the conditions of a run say of it, and who stays away."""

from __future__ import annotations

from typing import Any

import torch

import hvlike


def where(device: torch.device) -> dict[str, Any]:
    """What is measured, for the conditions of a run: the device, and how many ranks of this node share each GPU."""
    if device.type == "cpu":
        return {"device": "cpu"}
    gpus = min(torch.cuda.device_count(), hvlike.local_size())
    return {
        "device": torch.cuda.get_device_name(device),
        "gpus": gpus,
        "ranks_per_gpu": -(-hvlike.local_size() // gpus),
        "nccl": hvlike.nccl_built(),
    }


def cpu_only(device: torch.device) -> str | None:
    """Why Horovod, whose job here works in host memory, takes no part."""
    return None if device.type == "cpu" else "its part of this benchmark measures the CPU"


def settle(device: torch.device) -> None:
    """Wait until the device has done what this process has asked of it."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)

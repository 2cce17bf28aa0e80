"""What accelerate has to find before it looks around: where this rank is, and a process group."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState

from hvlike.collectives import lifecycle
from hvlike.errors import UsageError
from hvlike.integrations.torch_distributed import init_process_group


def init() -> None:
    """Start hvlike, torch.distributed over it, and tell accelerate of the ranks. Before TrainingArguments are made.

    Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which accelerate and transformers read, and where there is
    no GPU, ACCELERATE_USE_CPU. Accelerate then gathers metrics, deals out data and waits through hvlike, and every
    rank's `is_world_process_zero` is right.
    Collective: every rank calls it. Blocks until all have.
    Raises: UsageError where accelerate has looked around already; as torch_distributed.init_process_group.
    """
    init_process_group()
    places = {"RANK": lifecycle.rank(), "WORLD_SIZE": lifecycle.size()}
    places |= {"LOCAL_RANK": lifecycle.local_rank(), "LOCAL_WORLD_SIZE": lifecycle.local_size()}
    os.environ.update({name: str(value) for name, value in places.items()})
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if PartialState._shared_state:
        check_ranks(PartialState().num_processes)


def check_ranks(number: int) -> None:
    """Raise UsageError unless accelerate sees all ranks: each would train a model of its own."""
    if number != lifecycle.size():
        raise UsageError(
            f"accelerate sees {number} of the {lifecycle.size()} ranks: it was started before hvlike, and each rank "
            "would train by itself. Call hvlike.integrations.huggingface.init() before TrainingArguments, Accelerator "
            "or PartialState are made."
        )

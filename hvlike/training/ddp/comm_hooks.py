"""Communication hooks: how a DistributedDataParallel reduces its gradients. Those here, and what others do.

Registered as they are, these hooks are settings of the planned reduction, which goes on beside backward and needs no
copy. Called from another hook they reduce the bucket they are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from hvlike.collectives.allreduce import allreduce
from hvlike.collectives.compression import Compression, CompressorLike, PowerSGD, StatefulCompressor
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.reductions import Average
from hvlike.errors import UsageError
from hvlike.training.ddp.grad_bucket import GradBucket


class PowerSGDState:
    """The state of `powerSGD_hook`: its options, and what it remembers from step to step.

    process_group: accepted for torch's sake; the ranks are those of the module. For one module.
    Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState.
    """

    def __init__(self, process_group: ProcessSet | None = None, **options: Any) -> None:
        """options: those of hvlike.Compression.PowerSGD, by torch's names. Raises: UsageError for wrong values."""
        self.process_group = process_group
        self.compressor = PowerSGD(**options)


def allreduce_hook(process_set: ProcessSet | None, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks: what is done without a hook.

    process_set: the state; None for all ranks. Collective; blocks.
    Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
    """
    return _average(process_set, bucket, Compression.none)


def fp16_compress_hook(process_set: ProcessSet | None, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as float16. As `allreduce_hook` otherwise."""
    return _average(process_set, bucket, Compression.fp16)


def bf16_compress_hook(process_set: ProcessSet | None, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as bfloat16. As `allreduce_hook` otherwise."""
    return _average(process_set, bucket, Compression.bf16)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average over the ranks; gradients travel as low-rank approximations. Only to be registered.

    Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
    """
    raise UsageError("powerSGD_hook can only be registered: ddp.register_comm_hook(PowerSGDState(...), powerSGD_hook).")


def compression_of(state: Any, hook: object) -> CompressorLike | None:
    """Return what a hook of this file is to the planned reduction; None for others.

    Raises: UsageError for powerSGD_hook without its state.
    """
    if hook is powerSGD_hook:
        compressor = getattr(state, "compressor", state)
        if not isinstance(compressor, StatefulCompressor):
            raise UsageError(f"powerSGD_hook needs a PowerSGDState as its state, got {type(state).__name__}.")
        return compressor
    return _COMPRESSION.get(hook)


def _average(process_set: ProcessSet | None, bucket: GradBucket, compression: CompressorLike) -> Future[Tensor]:
    name = f"communication hook, bucket {bucket.index()}"
    reduced = allreduce(bucket.buffer(), op=Average, name=name, compression=compression, process_set=process_set)
    future: Future[Tensor] = torch.futures.Future()
    future.set_result(reduced)
    return future


_COMPRESSION: dict[object, CompressorLike] = {
    allreduce_hook: Compression.none,
    fp16_compress_hook: Compression.fp16,
    bf16_compress_hook: Compression.bf16,
}

"""The arguments of DistributedDataParallel, checked on this rank before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.errors import DataParallelError, UsageError, WrongTypeError
from hvlike.training.gradients.reduction import registered_set
from hvlike.transport.memory.own_memory import check_parameter

_MEBI = 1 << 20

_NO_DELAY = "Leave it out: gradients are reduced in the order in which they arrive."
_TORCH_ONLY = {
    "delay_all_reduce_named_params": _NO_DELAY,
    "param_to_hook_all_reduce": _NO_DELAY,
    "mixed_precision": "Use torch.autocast around forward, or a module of 16-bit parameters.",
    "device_mesh": "Pass process_set=hvd.add_process_set(ranks) for a part of the ranks.",
    "skip_all_reduce_unused_params": "Pass find_unused_parameters=True: what no rank has used keeps its gradient.",
    "bucket_cap_mb_list": "Pass bucket_cap_mb, which holds for all buckets.",
    # There is no copy of gradients that could be made in one go.
    "batched_grad_copy": "",
}


def parameters_of(module: nn.Module, ignored: set[str]) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if name not in ignored}


def check_module(module: object, ignored: set[str]) -> dict[str, Tensor]:
    """Return the parameters. Only for the constructor: a program may freeze all of them later."""
    if not isinstance(module, nn.Module):
        raise WrongTypeError(f"DistributedDataParallel expects a torch.nn.Module, got {type(module).__name__}.")
    parameters = parameters_of(module, ignored)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise DataParallelError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    lazy = [name for name, parameter in parameters.items() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise DataParallelError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            f"pass to correctly initialize the modules. Parameter {lazy[0]!r} has no shape yet."
        )
    for name, parameter in parameters.items():
        check_parameter(f"DistributedDataParallel, parameter {name!r}", parameter)
    kinds = sorted({parameter.device.type for parameter in parameters.values()})
    if len(kinds) > 1:
        raise UsageError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}."
        )
    return parameters


def check_devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Mapping[str, Tensor],
) -> torch.device | None:
    """Return the device that inputs are moved to; None: they are not moved."""
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError(f"device_ids can only be None or contain a single element. Got {list(device_ids)}.")
    devices = {parameter.device for parameter in parameters.values()}
    (kind,) = {device.type for device in devices}
    if kind == "cpu" or len(devices) > 1 or not device_ids:
        if device_ids or output_device is not None:
            raise UsageError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters "
                f"{sorted(map(str, devices))}. Leave both out."
            )
        return None
    (device_id,) = device_ids
    return torch.device(kind, device_id) if isinstance(device_id, int) else torch.device(device_id)


def check_bucket_cap(bucket_cap_mb: float | None) -> int | None:
    """Return how many bytes are reduced together; None: hvlike chooses."""
    if bucket_cap_mb is None:
        return None
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0:
        raise UsageError(f"bucket_cap_mb must be a number of MiB above 0, or None; got {bucket_cap_mb!r}.")
    return max(1, int(bucket_cap_mb * _MEBI))


def check_torch_only(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _TORCH_ONLY:
            raise WrongTypeError(f"DistributedDataParallel.__init__() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False and _TORCH_ONLY[name]:
            raise UsageError(
                f"DistributedDataParallel: {name} is torch's and not supported, got {value!r}. {_TORCH_ONLY[name]}"
            )


def check_ranks(process_set: object, process_group: object) -> ProcessSet | None:
    """Return the set of ranks, None for all."""
    if process_set is not None and process_group is not None and process_set is not process_group:
        raise UsageError("DistributedDataParallel: process_set and process_group are two names of one argument.")
    chosen = process_group if process_set is None else process_set
    found = registered_set(chosen, "DistributedDataParallel")
    if found is not None and not found.included():
        raise UsageError(f"DistributedDataParallel: this rank is not among the ranks {found.ranks} of process_set.")
    return found


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, moved(item, device)) for key, item in value.items())
    return value

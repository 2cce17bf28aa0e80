"""How tensors of a GPU travel: as copies in host memory, which are put on a device again where they arrive.

The copy is made in the stream that is the current one of the thread that packs the message, after all that this thread
has asked of the device; so it is what the thread would see. That thread waits for it. Where the message is opened the
copy goes to the device in the current stream of the thread that opens it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hvlike.errors import RpcError


def target_of(tensor: Tensor, device_map: Mapping[torch.device, torch.device], what: str) -> torch.device:
    """Where a tensor of a GPU goes. what: "Request" or "Response", and to whom. Raises: RuntimeError without a map."""
    target = device_map.get(tensor.device)
    if target is None:
        known = f"; it has {sorted(map(str, device_map))}" if device_map else ""
        raise RpcError(
            f"RPC only supports CPU tensors by default, got one of shape {list(tensor.shape)} on {tensor.device}: "
            "please move your tensors to CPU before sending them over RPC (tensor.cpu()), or call `set_device_map` on "
            f"`TensorPipeRpcBackendOptions` to explicitly configure device mapping. {what}: device mapping is not "
            f"available for {tensor.device}{known}."
        )
    return target


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, with the same strides where they leave no gaps. Waits for the device."""
    return tensor.detach().to("cpu")


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device, in the current stream; the tensor may be changed afterwards."""
    return tensor.to(device)

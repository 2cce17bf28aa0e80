"""Running tests on another device: every tensor that they make without a word on its device is made there."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class OnDevice(TorchFunctionMode):
    """Like torch.set_default_device; what a generator of the CPU draws is drawn there, so the same numbers come."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in _device_constructors() and given.get("device") is None:
            generator = given.get("generator")
            if generator is not None and generator.device.type == "cpu":
                return func(*args, **given).to(self._device)
            given = {**given, "device": self._device}
        return func(*args, **given)

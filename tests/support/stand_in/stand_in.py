"""torch for the CPU, made to believe in two devices of CUDA, or two XPUs: see device.cpp. To be imported before torch,
in a process of its own; STAND_IN_LIBRARY names what `build` has made.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

_library = ctypes.CDLL(os.environ["STAND_IN_LIBRARY"], ctypes.RTLD_GLOBAL)
_library.stand_in_count.restype = ctypes.c_long

import torch  # noqa: E402

DEVICES = 2
_COUNTS = ("copies to the host", "questions", "copies to the device", "synchronisations")


def counts() -> dict[str, int]:
    """How often the host has waited for the device, or would have, since the process began."""
    return {name: _library.stand_in_count(which) for which, name in enumerate(_COUNTS)}


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(_library.stand_in_device()) if index is None else index


class _Device:
    """torch.cuda.device"""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _index()
        _library.stand_in_set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _library.stand_in_set_device(self._before)


class _Stream(torch.Stream):
    """torch.cuda.Stream"""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> "_Stream":
        return super().__new__(cls, device=torch.device("cuda", _index(device)))

    @property
    def cuda_stream(self) -> int:
        """What libraries in C call it."""
        return self.stream_id


class _Properties:
    """torch.cuda.get_device_properties"""

    def __init__(self, device: Any = None) -> None:
        self.name = "stand-in"
        self.uuid = f"stand-in-{_index(device)}"
        self.total_memory = 1 << 31
        self.major, self.minor = 8, 0


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("cuda", _index(device)))


_REPLACED: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: DEVICES,
    "current_device": _index,
    "set_device": lambda device: _library.stand_in_set_device(_index(device)),
    "device": _Device,
    "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
    "Stream": _Stream,
    "stream": _stream,
    "current_stream": _current_stream,
    "default_stream": _current_stream,
    "get_device_name": lambda device=None: "stand-in",
    "get_device_properties": _Properties,
    "is_current_stream_capturing": lambda: False,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
}
KIND = "xpu" if "xpu" in os.path.basename(os.environ["STAND_IN_LIBRARY"]) else "cuda"
# What hvlike asks of another kind than CUDA it asks of torch.accelerator, which asks these.
_ASKED = ("_lazy_init", "is_available", "is_initialized", "device_count", "current_device", "set_device", "synchronize")
for _name, _value in _REPLACED.items():
    if KIND == "cuda" or _name in (*_ASKED, "manual_seed", "manual_seed_all"):
        setattr(getattr(torch, KIND), _name, _value)

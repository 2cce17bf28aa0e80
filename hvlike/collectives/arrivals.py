"""Where the gradients of a planned reduction are made, when they are on a device: the streams to wait for.

Backward runs each node in the stream of its forward call, and so the hooks. A bucket may start once all these streams
are where they were when the hooks ran; who uses the results in one of them waits in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from hvlike.planes.cuda.device_plane import DevicePlane
from hvlike.planes.cuda.runtime import DeviceRuntime, Stream, runtime_of


class OnDevice(Protocol):
    """What has a device."""

    @property
    def device(self) -> torch.device:
        """Where it is."""


class Arrivals:
    """The streams of one step, by bucket; used with the lock of the reducer held."""

    def __init__(self, runtime: DeviceRuntime, devices: Sequence[torch.device]) -> None:
        """devices: all that have gradients; the first is where they are reduced."""
        self.home = devices[0]
        self._runtime = runtime
        self._devices = devices
        self._streams: dict[int, dict[Stream, None]] = {}

    def note(self, bucket: int, tensor: torch.Tensor) -> None:
        """A tensor of a bucket is made where this thread is now."""
        self._streams.setdefault(bucket, {})[self._runtime.current_stream(tensor.device)] = None

    def streams(self, bucket: int) -> Collection[Stream]:
        """What a bucket that is started now has to wait for."""
        return {**self._streams.get(bucket, {}), **self._current()}

    def leave(self, plane: DevicePlane | None) -> BaseException | None:
        """Make this thread's streams, and those that were noted, wait for the results; what has gone wrong, if any."""
        if plane is None:
            return None
        if plane.broken is None:
            event = self._runtime.record(plane.stream)
            noted = {stream: None for streams in self._streams.values() for stream in streams}
            for stream in {**noted, **self._current()}:
                self._runtime.wait(stream, event)
        return plane.broken

    def clear(self) -> None:
        """A step is over."""
        self._streams.clear()

    def _current(self) -> dict[Stream, None]:
        return {self._runtime.current_stream(device): None for device in self._devices}


def arrivals_of(entries: Sequence[OnDevice]) -> Arrivals | None:
    """For tensors of these devices; None where all are reduced in host memory."""
    devices = dict.fromkeys(each.device for each in entries)
    found = [(runtime, device) for device in devices if (runtime := runtime_of(device.type)) is not None]
    return Arrivals(found[0][0], [device for _, device in found]) if found else None

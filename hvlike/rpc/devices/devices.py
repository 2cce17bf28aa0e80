"""The GPUs that RPC uses on one worker: where tensors go from here, and in which streams their values are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from hvlike.planes.cuda.runtime import Event, runtime_of
from hvlike.rpc.devices.device_map import DeviceMap, Offer, inverse


class Marks:
    """The points in some streams at which a value was there."""

    __slots__ = ("_events",)

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Mark what this thread has asked of these devices so far, in its current streams."""
        self._events: list[tuple[torch.device, Event]] = []
        for device in devices:
            runtime = runtime_of(device.type)
            if runtime is not None:
                self._events.append((device, runtime.record(runtime.current_stream(device))))

    def follow(self) -> None:
        """What this thread asks of the devices from now on is done after these points. The host does not wait."""
        for device, event in self._events:
            runtime = runtime_of(device.type)
            if runtime is not None:
                runtime.wait(runtime.current_stream(device), event)


class Devices:
    """What one worker knows of the device maps of a session."""

    def __init__(self, rank: int, names: Sequence[str], offers: Sequence[Offer], extra: Iterable[torch.device]) -> None:
        """offers: of all workers, by rank. extra: devices that are used here beside those in the maps."""
        me = names[rank]
        maps = offers[rank].maps
        itself = {torch.device("cuda", index): torch.device("cuda", index) for index in range(offers[rank].gpus)}
        self._requests: dict[int, DeviceMap] = {other: maps[name] for other, name in enumerate(names) if name in maps}
        self._answers: dict[int, DeviceMap] = {
            other: inverse(offer.maps[me]) for other, offer in enumerate(offers) if me in offer.maps
        }
        # What a worker tells itself stays where it is, unless it says otherwise.
        self._requests.setdefault(rank, itself)
        self._answers.setdefault(rank, itself)
        used: dict[torch.device, None] = dict.fromkeys(extra)
        for device_map in (*self._requests.values(), *self._answers.values()):
            if device_map is not itself:
                used.update(dict.fromkeys(device_map))
        self.used = tuple(used)
        """The devices of this worker that values are followed on."""

    def of_requests(self, rank: int) -> Mapping[torch.device, torch.device]:
        """Where tensors go that are sent to a worker as arguments."""
        return self._requests.get(rank, {})

    def of_answers(self, rank: int) -> Mapping[torch.device, torch.device]:
        """Where tensors go that are sent to a worker as results."""
        return self._answers.get(rank, {})

    def marks(self) -> Marks | None:
        """Marks of now; None where no device is used."""
        return Marks(self.used) if self.used else None


def follow(marks: Marks | None) -> None:
    """Let this thread's streams come after the marks, if there are any."""
    if marks is not None:
        marks.follow()

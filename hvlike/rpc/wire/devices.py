"""GPU tensors in messages: device maps, CUDA events that say when a value is ready, and copies through host memory.

worker0   device_maps={"worker1": {0: 1}}      requests   cuda:0 of worker0 -> cuda:1 of worker1
                                               replies    cuda:1 of worker1 -> cuda:0 of worker0

The sending thread copies a GPU tensor to host memory on its current stream and waits for the copy. The receiving thread
copies it to the target device on its own current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hvlike.backends.cuda.runtime import runtime_of
from hvlike.errors import RpcError, UsageError, WrongTypeError

DeviceMap: TypeAlias = dict[torch.device, torch.device]  # Devices of the sender -> devices of the receiver, one to one


class DeviceOffer(NamedTuple):
    """What a worker tells the others about its GPUs."""

    gpus: int  # How many it has
    maps: dict[str, DeviceMap]  # Its device map for each worker that it calls, by name


def device_of(what: str, given: object) -> torch.device:
    """Return the GPU named by an int, a str or a torch.device. Raises: UsageError that begins with `what`."""
    try:
        if isinstance(given, bool) or not isinstance(given, (int, str, torch.device)):
            raise RuntimeError("expected a number, 'cuda:<number>' or a torch.device")
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except RuntimeError as error:
        raise UsageError(f"{what}: {given!r} is no device: {error}") from None
    if device.type != "cuda" or device.index is None:
        raise UsageError(
            f"{what}: {given!r} is no GPU with a number, such as 1 or 'cuda:1'. Tensors of the CPU arrive on the CPU, "
            "without a map."
        )
    return device


def parse_map(what: str, given: Mapping[Any, Any], before: Mapping[torch.device, torch.device]) -> DeviceMap:
    """Return the map `before` with `given` added. Raises: UsageError that begins with `what` if not one to one."""
    if not isinstance(given, Mapping):
        raise WrongTypeError(f"{what}: expected a dict from devices here to devices there, got {type(given).__name__}.")
    whole = dict(before)
    for source, target in given.items():
        here, there = device_of(what, source), device_of(what, target)
        known = whole.get(here, there)
        if known != there or any(each == there for other, each in whole.items() if other != here):
            shown = ", ".join(f"{source}: {target}" for source, target in (before or whole).items())
            raise UsageError(
                f"{what}: `set_device_map` only supports 1-to-1 mapping, trying to map {here} to {there} beside "
                f"{{{shown}}}."
            )
        whole[here] = there
    return whole


def check_offers(names: Sequence[str], offers: Sequence[DeviceOffer]) -> str:
    """Return what is wrong with the maps of all workers (the same text on each), or an empty string."""
    place = {name: rank for rank, name in enumerate(names)}
    wrong = []
    for name, offer in zip(names, offers, strict=True):
        for to, device_map in offer.maps.items():
            if to not in place:
                wrong.append(f"{name} maps devices to {to!r}, which is no worker (workers: {', '.join(names[:16])})")
                continue
            wrong += _missing(f"{name} maps from", device_map, offer.gpus, name)
            wrong += _missing(f"{name} maps to", device_map.values(), offers[place[to]].gpus, to)
    return "; ".join(wrong)


def _missing(what: str, devices: Iterable[torch.device], count: int, owner: str) -> list[str]:
    has = f"which {owner} has not (it has {count or 'none'})"
    return [f"{what} {each}, {has}" for each in devices if each.index >= count]


class ReadyEvents:
    """Events in the current streams of some devices: what was queued before them is the value."""

    __slots__ = ("_events",)

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Record an event in this thread's current stream of each device."""
        runtimes = [(runtime, device) for device in devices if (runtime := runtime_of(device.type)) is not None]
        self._events = [(each, device, each.record(each.current_stream(device))) for each, device in runtimes]

    def follow(self) -> None:
        """Make this thread's current streams wait for the events. The host does not wait."""
        for runtime, device, event in self._events:
            runtime.wait(runtime.current_stream(device), event)


NO_EVENTS = ReadyEvents(())


class DeviceMaps:
    """The device maps of a session, as one worker uses them."""

    def __init__(
        self, rank: int, names: Sequence[str], offers: Sequence[DeviceOffer], extra: Iterable[torch.device]
    ) -> None:
        """`names` and `offers` are by rank; `extra` devices are used here beside those in the maps."""
        me = names[rank]
        maps = offers[rank].maps
        itself = {torch.device("cuda", index): torch.device("cuda", index) for index in range(offers[rank].gpus)}
        # Where tensors in arguments go, by the callee's rank, and those in results, by the caller's.
        self.requests: dict[int, DeviceMap] = {other: maps[name] for other, name in enumerate(names) if name in maps}
        self.replies: dict[int, DeviceMap] = {
            other: {there: here for here, there in offer.maps[me].items()}
            for other, offer in enumerate(offers)
            if me in offer.maps
        }
        # Tensors that a worker sends to itself stay on their device, unless its maps say otherwise.
        self.requests.setdefault(rank, itself)
        self.replies.setdefault(rank, itself)
        used: dict[torch.device, None] = dict.fromkeys(extra)
        for device_map in (*self.requests.values(), *self.replies.values()):
            if device_map is not itself:
                used.update(dict.fromkeys(device_map))
        self.used = tuple(used)  # Where values may still be computed when they are handed over

    def ready_events(self) -> ReadyEvents:
        """Record events on the used devices."""
        return ReadyEvents(self.used) if self.used else NO_EVENTS


def target_device(tensor: Tensor, device_map: Mapping[torch.device, torch.device], what: str) -> torch.device:
    """Return where a GPU tensor goes. Raises: RuntimeError without a map; `what` names the message and its receiver."""
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

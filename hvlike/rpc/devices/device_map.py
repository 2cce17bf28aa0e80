"""Device maps: where tensors of one worker's GPUs go on another worker. Pure functions.

worker0   device_maps={"worker1": {0: 1}}      requests   cuda:0 of worker0 -> cuda:1 of worker1
                                               answers    cuda:1 of worker1 -> cuda:0 of worker0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from hvlike.errors import UsageError

DeviceMap: TypeAlias = dict[torch.device, torch.device]
"""From devices of the sender to those of the receiver; one to one."""


class Offer(NamedTuple):
    """What a worker tells the others of its GPUs."""

    gpus: int
    """How many it has."""
    maps: dict[str, DeviceMap]
    """By the names of the workers that it calls."""


NO_DEVICES = Offer(0, {})


def device_of(what: str, given: object) -> torch.device:
    """The GPU that is meant by a number, a text or a torch.device. Raises: UsageError that begins with `what`."""
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
    """What `given` adds to a map. Raises: UsageError that begins with `what` unless the whole is one to one."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{what}: expected a dict from devices here to devices there, got {type(given).__name__}.")
    whole = dict(before)
    for source, target in given.items():
        here, there = device_of(what, source), device_of(what, target)
        known = whole.get(here, there)
        if known != there or any(each == there for other, each in whole.items() if other != here):
            raise UsageError(
                f"{what}: `set_device_map` only supports 1-to-1 mapping, trying to map {here} to {there} beside "
                f"{shown(before or whole)}."
            )
        whole[here] = there
    return whole


def shown(device_map: Mapping[torch.device, torch.device]) -> str:
    """{cuda:0: cuda:1}"""
    return "{" + ", ".join(f"{source}: {target}" for source, target in device_map.items()) + "}"


def inverse(device_map: Mapping[torch.device, torch.device]) -> DeviceMap:
    """The way back."""
    return {target: source for source, target in device_map.items()}


def check_offers(names: Sequence[str], offers: Sequence[Offer]) -> str:
    """What is wrong with the maps of all workers, the same text on each; empty where nothing is."""
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
    found = f"it has {count or 'none'}"
    return [f"{what} {each}, which {owner} has not ({found})" for each in devices if each.index >= count]

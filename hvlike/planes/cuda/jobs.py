"""Jobs on tensors of a device: how they find its plane, and what they see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from hvlike.planes.cuda.device_plane import DevicePlane
from hvlike.planes.cuda.runtime import Event
from hvlike.planes.lane import Job, Lane
from hvlike.planes.plane import Plane
from hvlike.planes.traced import TracedPlane
from hvlike.transport.routine import Routine

T = TypeVar("T")


def device_of(plane: Plane) -> DevicePlane | None:
    """The plane of a device that a job was given; None where it works on host memory."""
    inner = plane.plane if isinstance(plane, TracedPlane) else plane
    return inner if isinstance(inner, DevicePlane) else None


def home_of(plane: Plane) -> torch.device | None:
    """The device on which the tensors of a job have to be; None for host memory."""
    device = device_of(plane)
    return None if device is None else device.home


def on_device(
    lane: Lane, opening: Callable[[Plane], Routine[DevicePlane | None]] | None, job: Job, ready: Iterable[Event] = ()
) -> Job:
    """The same job for the plane of the lane's device.

    opening: opens it if this is the first job, or returns None, and the job is not run; None where it was opened with
    the lane. ready: when the tensors of the
    job hold their values.
    """

    def run(host: Plane) -> Routine[None]:
        if lane.device is None and opening is not None:
            lane.device = yield from opening(lane.plane)
        device = lane.device
        if device is None:
            return
        plane: Plane = host.over(device) if isinstance(host, TracedPlane) else device
        yield from device.run(job(plane), ready)

    return run


def beside(plane: Plane, work: Callable[[Plane], Routine[T]]) -> Routine[T]:
    """Have the ranks' hosts do something among themselves in the middle of a job; its result."""
    device = device_of(plane)
    if device is None:
        return (yield from work(plane))
    return (yield from device.beside(work(device.host)))


def in_host_memory(
    plane: Plane, tensors: Sequence[torch.Tensor], work: Callable[[Plane, Sequence[torch.Tensor]], Routine[None]]
) -> Routine[None]:
    """Do `work(plane, tensors)` where it knows host memory only: with copies, where the tensors are on a device."""
    device = device_of(plane)
    yield from work(plane, tensors) if device is None else device.on_host(tensors, work)

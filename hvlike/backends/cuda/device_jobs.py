"""Jobs on tensors of a device: how they find its backend, and what they see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from hvlike.backends.base import Backend, TracedBackend
from hvlike.backends.cuda.device_backend import DeviceBackend
from hvlike.backends.cuda.runtime import Event
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.transport.loop.coroutine import Coroutine

T = TypeVar("T")


def device_of(backend: Backend) -> DeviceBackend | None:
    """The backend of a device that a job was given; None where it works on host memory."""
    inner = backend.backend if isinstance(backend, TracedBackend) else backend
    return inner if isinstance(inner, DeviceBackend) else None


def home_of(backend: Backend) -> torch.device | None:
    device = device_of(backend)
    return None if device is None else device.home


def on_device(
    queue: OpQueue,
    opening: Callable[[Backend], Coroutine[DeviceBackend | None]] | None,
    job: Job,
    ready: Iterable[Event] = (),
) -> Job:
    """The same job for the device backend of the op queue.

    opening: opens it if this is the first job, or returns None, and the job is not run; None where it was opened with
    the queue. ready: when the tensors of the job hold their values.
    """

    def run(host: Backend) -> Coroutine[None]:
        if queue.device is None and opening is not None:
            queue.device = yield from opening(queue.backend)
        device = queue.device
        if device is None:
            return
        backend: Backend = host.over(device) if isinstance(host, TracedBackend) else device
        yield from device.run(job(backend), ready)

    return run


def beside(backend: Backend, work: Callable[[Backend], Coroutine[T]]) -> Coroutine[T]:
    """Have the ranks' hosts do something among themselves in the middle of a job; its result."""
    device = device_of(backend)
    if device is None:
        return (yield from work(backend))
    return (yield from device.beside(work(device.host)))


def in_host_memory(
    backend: Backend,
    tensors: Sequence[torch.Tensor],
    work: Callable[[Backend, Sequence[torch.Tensor]], Coroutine[None]],
) -> Coroutine[None]:
    """Do `work(backend, tensors)`, which takes host memory only: with copies, where the tensors are on a device."""
    device = device_of(backend)
    yield from work(backend, tensors) if device is None else device.on_host(tensors, work)

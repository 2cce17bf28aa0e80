"""Making the backend of a device when its first tensor comes: all ranks report what they have, then one choice follows,
a pure function of the reports.

Jobs of the first op queue open the backends of a process set, so the order is the same on every rank.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda import nccl
from hvlike.backends.cuda.device_backend import DeviceBackend, SoloDeviceBackend
from hvlike.backends.cuda.nccl import NcclBackend
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.config import Config
from hvlike.errors import LaunchError
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.world import Group

logger = logging.getLogger("hvlike")

_RECORD_BYTES = 1024
_CONNECT_SECONDS = 120.0

NCCL, STAGED, SOLO = "nccl", "staged", "solo"  # HVLIKE_CUDA_PLANE may ask for one of the first two


class DeviceFacts(NamedTuple):
    host: str
    gpu: str
    nccl: int  # Version of NCCL; 0 where it cannot be used
    missing: str
    cupy: str = ""  # Its version; empty where it is not installed


class BackendChoice(NamedTuple):
    backend: str
    reason: str
    is_unexpected: bool = False  # What was installed to be faster cannot serve


def choose_backend(facts: Sequence[DeviceFacts], ranks: Sequence[int], wanted: str) -> BackendChoice:
    """The backend of a process set, the same on every rank; ranks: their numbers in the world. wanted:
    HVLIKE_CUDA_PLANE. Raises: LaunchError where it cannot serve, with the reason and what to do.
    """
    obstacle = why_not_nccl(facts, ranks)
    if wanted == NCCL:
        if obstacle:
            raise LaunchError(
                f"HVLIKE_CUDA_PLANE=nccl, but {obstacle}. Unset it: tensors then travel through host memory."
            )
        return BackendChoice(NCCL, "HVLIKE_CUDA_PLANE=nccl")
    if len(facts) == 1:
        return BackendChoice(SOLO, "the rank is alone")
    if wanted == STAGED:
        return BackendChoice(STAGED, "HVLIKE_CUDA_PLANE=staged")
    if not obstacle:
        return BackendChoice(NCCL, "every rank has a GPU of its own and NCCL")
    return BackendChoice(STAGED, obstacle, is_unexpected=any(each.cupy and not each.nccl for each in facts))


def why_not_nccl(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    for rank, each in zip(ranks, facts, strict=True):
        if not each.nccl:
            return f"rank {rank} has no NCCL ({each.missing})"
    first: dict[tuple[str, str], int] = {}
    for rank, each in zip(ranks, facts, strict=True):
        other = first.setdefault((each.host, each.gpu), rank)
        if other != rank:
            gpus = len({gpu for host, gpu in first if host == each.host})
            here = sum(fact.host == each.host for fact in facts)
            return (
                f"ranks {other} and {rank} on {each.host} share the GPU {each.gpu} ({here} ranks use {gpus} of its "
                "GPUs), and NCCL needs one for each: call torch.cuda.set_device(hvd.local_rank()) first, or start "
                "fewer ranks"
            )
    versions = {each.nccl: rank for rank, each in zip(ranks, facts, strict=True)}
    if len(versions) > 1:
        reported = ", ".join(f"{version} on rank {rank}" for version, rank in sorted(versions.items()))
        return f"the ranks have different versions of NCCL ({reported})"
    return ""


class DeviceBackends:
    """The backends of one process set for one kind of device, on this rank. Used in the loop."""

    def __init__(self, group: Group, knobs: Config, host: str) -> None:
        self._group = group
        self._knobs = knobs
        self._host = host
        self._opened: list[NcclBackend] = []
        self.choice: BackendChoice | None = None

    def open(self, host: Backend, runtime: DeviceRuntime, device: torch.device | None) -> Coroutine[DeviceBackend]:
        """Make the device backend of an op queue. Collective, in the same order everywhere. device: where this rank has
        its tensors; None: it has none. Raises: LaunchError, on every rank, when the backend that is wanted cannot
        serve.
        """
        if device is None:
            device = runtime.home(self._group.world.local_rank)
        if self.choice is None:
            self.choice = yield from self._choose(host, runtime, device)
            self._log(device)
        group = self._group
        if self.choice.backend == NCCL:
            communicator = yield from self._connect(host, runtime, device)
            if communicator is not None:
                place = (group.rank, group.size)
                backend = NcclBackend(host, runtime, device, place, communicator, self._knobs.nccl_timeout)
                self._opened.append(backend)
                return backend
        kind = SoloDeviceBackend if self.choice.backend == SOLO else DeviceBackend
        return kind(host, runtime, device, group.rank)

    def close(self) -> None:
        """Wait until the communicators have ended, which the op queues have asked for on all ranks."""
        until = time.monotonic() + 2 * nccl.FINISH_SECONDS
        opened, self._opened = self._opened, []
        if not all(each.join(until) for each in opened):
            logger.warning("NCCL has not ended its communicators within %g s", 2 * nccl.FINISH_SECONDS)

    def _choose(self, host: Backend, runtime: DeviceRuntime, device: torch.device) -> Coroutine[BackendChoice]:
        knobs = self._knobs
        why_none = "HVLIKE_CUDA_PLANE=staged" if knobs.cuda_plane == STAGED else f"{device.type} is not CUDA"
        found = nccl.NcclFacts("", 0, why_none)
        if knobs.cuda_plane != STAGED and runtime.has_nccl and (self._group.size > 1 or knobs.cuda_plane == NCCL):
            found = nccl.describe()
        # As NCCL counts hosts: it refuses two ranks on one GPU of one host.
        host_name = os.environ.get("NCCL_HOSTID") or self._host
        mine = DeviceFacts(host_name, runtime.identity(device), found.version, found.missing[:300], found.cupy)
        facts = [DeviceFacts(*each) for each in (yield from _tell_all(host, self._group, mine))]
        return choose_backend(facts, self._group.ranks, knobs.cuda_plane)

    def _log(self, device: torch.device) -> None:
        choice = self.choice
        if choice is not None and self._group.ranks[self._group.rank] == 0:
            kind = device.type.upper()
            logger.log(
                logging.WARNING if choice.is_unexpected else logging.INFO,
                *("%s tensors of process set %d: %s backend, as %s", kind, self._group.number),
                *(choice.backend, choice.reason),
            )

    def _connect(
        self, host: Backend, runtime: DeviceRuntime, device: torch.device
    ) -> Coroutine[nccl.Communicator | None]:
        """A communicator for one more op queue; None where some rank fails, and host memory serves instead."""
        group = self._group
        library = nccl.load()
        number = torch.zeros(nccl.ID_BYTES, dtype=torch.uint8, device="cpu")
        if group.rank == 0:
            number = torch.frombuffer(bytearray(library.new_id()), dtype=torch.uint8)
        yield from host.gather([number], [0])
        known = bytes(number.tolist())
        return (yield from self._agree(host, runtime, device, lambda: library.connect(group.size, known, group.rank)))

    def _agree(
        self, host: Backend, runtime: DeviceRuntime, device: torch.device, make: Callable[[], nccl.Communicator]
    ) -> Coroutine[nccl.Communicator | None]:
        """What `make` returns, if it does so on all ranks; else None, or an error where NCCL was demanded."""
        made: list[nccl.Communicator] = []
        failure = ""

        def attempt() -> None:
            nonlocal failure
            try:
                # NCCL takes the current device.
                with runtime.use(runtime.current_stream(device)):
                    made.append(make())
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"[:300]

        # It waits for other ranks: in a thread of its own, as the loop must go on.
        thread = threading.Thread(target=attempt, name="hvlike-nccl-connect", daemon=True)
        thread.start()
        until = time.monotonic() + _CONNECT_SECONDS
        while thread.is_alive() and time.monotonic() <= until:
            yield Wait.POLL
        if thread.is_alive():
            failure = f"the other ranks have not answered for {_CONNECT_SECONDS:g} s"
        errors = yield from _tell_all(host, self._group, failure)
        wrong = [f"rank {rank}: {text}" for rank, text in zip(self._group.ranks, errors, strict=True) if text]
        if not wrong:
            return made[0]
        for communicator in made:
            communicator.abort()
        if self._knobs.cuda_plane == NCCL:
            raise LaunchError(f"HVLIKE_CUDA_PLANE=nccl, but no communicator could be made: {'; '.join(wrong[:3])}")
        self.choice = BackendChoice(STAGED, f"no communicator of NCCL could be made ({wrong[0]})", is_unexpected=True)
        self._log(device)
        return None


def _tell_all(host: Backend, group: Group, value: Any) -> Coroutine[list[Any]]:
    """What every rank passes, in order; plain values of at most _RECORD_BYTES bytes of JSON."""
    records = [torch.zeros(_RECORD_BYTES, dtype=torch.uint8, device="cpu") for _ in range(group.size)]
    text = json.dumps(value).encode()
    records[group.rank][: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    yield from host.gather(records, list(range(group.size)))
    return [json.loads(bytes(record.tolist()).rstrip(b"\0")) for record in records]

"""Making the backend of a device when its first tensor comes: what all ranks have is gathered, then one choice follows.

The backends of a process set are opened by jobs of its first op queue, so in the same order on every rank.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvlike.backends.base import Backend
from hvlike.backends.cuda import nccl
from hvlike.backends.cuda.device_backend import DeviceBackend
from hvlike.backends.cuda.ipc_backend import BUFFER_BYTES, IpcBackend, prove
from hvlike.backends.cuda.mpi_backend import MpiBackend
from hvlike.backends.cuda.nccl_backend import NcclBackend
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.backends.cuda.selection import IPC, MPI, NCCL, STAGED, Choice, DeviceFacts, choose_backend
from hvlike.backends.cuda.staged_backend import SoloDeviceBackend, StagedBackend
from hvlike.config import Config
from hvlike.errors import LaunchError
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.messages.device_messages import DeviceMessages
from hvlike.transport.world import Group

logger = logging.getLogger("hvlike")

_RECORD_BYTES = 1024
_SHARED_BYTES = 16384
_CONNECT_SECONDS = 120.0
_PLANES = 4096


class DeviceBackends:
    """The planes of one process set for one kind of device, on this rank. Used in the loop."""

    def __init__(self, group: Group, knobs: Config, host: str) -> None:
        """host: the name of this machine."""
        self._group = group
        self._knobs = knobs
        self._host = host
        self._root: nccl.Communicator | None = None
        self._numbers = 0
        self.choice: Choice | None = None
        """What was chosen; None before the first tensor."""

    def open(self, host: Backend, runtime: DeviceRuntime, device: torch.device | None) -> Coroutine[DeviceBackend]:
        """Make the plane of a lane. Collective over the group; opened in the same order everywhere.

        host: the lane's plane for host memory. device: where this rank has its tensors; None where it has none.
        Raises: LaunchError, on every rank, when the plane that is wanted cannot serve.
        """
        if device is None:
            device = runtime.home(self._group.world.local_rank)
        if self.choice is None:
            self.choice = yield from self._choose(host, runtime, device)
            self._say()
        place = (self._group.rank, self._group.size)
        if self.choice.plane == NCCL:
            communicator = yield from self._connect(host, runtime, device)
            if communicator is not None:
                return NcclBackend(host, runtime, device, place, communicator, self._knobs.nccl_timeout)
        if self.choice.plane == MPI:
            return (yield from self._proved(host, self._over_mpi(host, runtime, device)))
        if self.choice.plane == IPC:
            over_ipc = yield from self._over_ipc(host, runtime, device)
            return (yield from self._proved(host, over_ipc))
        if self.choice.plane == "solo":
            return SoloDeviceBackend(host, runtime, device, place[0])
        return StagedBackend(host, runtime, device, place[0])

    def close(self) -> None:
        """Give back what all planes share."""
        if self._root is not None:
            self._root.abort()
            self._root = None

    def _choose(self, host: Backend, runtime: DeviceRuntime, device: torch.device) -> Coroutine[Choice]:
        knobs = self._knobs
        found = nccl.NcclFacts("", 0, "HVLIKE_CUDA_PLANE=staged", "", 0)
        if knobs.cuda_plane != STAGED and (self._group.size > 1 or knobs.cuda_plane == NCCL):
            found = nccl.describe()
        refusal = self._why_no_mpi()
        mine = DeviceFacts(self._host, runtime.identity(device), found.version, found.missing[:300], refusal)
        facts = [DeviceFacts(*each) for each in (yield from _tell_all(host, self._group, mine))]
        return choose_backend(facts, self._group.ranks, knobs.cuda_plane)

    def _say(self) -> None:
        choice = self.choice
        if choice is not None and self._group.ranks[self._group.rank] == 0:
            logger.info("CUDA tensors of process set %d: %s plane, as %s", self._group.number, *choice)

    # -- MPI ------------------------------------------------------------------------------------

    def _why_no_mpi(self) -> str:
        if not self._knobs.cuda_aware_mpi:
            return "HVLIKE_CUDA_AWARE_MPI=1 is not set"
        denied = mpi_library.claims_cuda() is False
        return "the MPI library says that it does not take memory of a GPU" if denied else ""

    def _over_mpi(self, host: Backend, runtime: DeviceRuntime, device: torch.device) -> DeviceBackend:
        group, world = self._group, self._group.world
        # Opened in the same order on all ranks, so they give the same numbers.
        self._numbers += 1
        number = group.number % _PLANES * _PLANES + self._numbers % _PLANES
        messages = DeviceMessages(world.mpi, world.comm, group.ranks, number)
        return MpiBackend(host, runtime, device, (group.rank, group.size), messages)

    # -- IPC ------------------------------------------------------------------------------------

    def _over_ipc(self, host: Backend, runtime: DeviceRuntime, device: torch.device) -> Coroutine[DeviceBackend]:
        """Raises: LaunchError, on every rank, where some rank cannot map what the others share."""
        group = self._group
        own = runtime.shareable(BUFFER_BYTES, device)
        shared = yield from _tell_all(host, group, runtime.share(own).hex(), _SHARED_BYTES)
        buffers, error = [], ""
        try:
            for rank, each in enumerate(shared):
                buffers.append(own if rank == group.rank else runtime.attach(bytes.fromhex(each)))
        except (RuntimeError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
        self._refuse(IPC, (yield from _tell_all(host, group, error)))
        return IpcBackend(host, runtime, device, (group.rank, group.size), buffers)

    # -- proofs ---------------------------------------------------------------------------------

    def _proved(self, host: Backend, plane: DeviceBackend) -> Coroutine[DeviceBackend]:
        """The plane, if it reduces something right on all ranks; else one over host memory, if any plane will do.

        Raises: LaunchError, on every rank, where only this kind will do.
        """
        group = self._group
        errors = (group.world.mpi.Exception, RuntimeError, OSError)
        said = yield from _tell_all(
            host, group, (yield from plane.run(prove(plane, (group.rank, group.size), errors)))[:300]
        )
        if not any(said):
            return plane
        plane.close()
        kind = self.choice.plane if self.choice is not None else ""
        wrong = self._refuse(kind, said)
        self.choice = Choice(STAGED, f"the trial of the {kind} plane has failed ({wrong})")
        self._say()
        return StagedBackend(host, plane.runtime, plane.home, group.rank)

    def _refuse(self, kind: str, said: Sequence[str]) -> str:
        """The first that was said, with its rank. Raises: LaunchError if anything was, and only this kind will do."""
        wrong = [f"rank {rank}: {text}" for rank, text in zip(self._group.ranks, said, strict=True) if text]
        if wrong and self._knobs.cuda_plane == kind:
            raise LaunchError(f"HVLIKE_CUDA_PLANE={kind}, but its trial has failed: {'; '.join(wrong[:3])}")
        return wrong[0] if wrong else ""

    # -- NCCL -----------------------------------------------------------------------------------

    def _connect(
        self, host: Backend, runtime: DeviceRuntime, device: torch.device
    ) -> Coroutine[nccl.Communicator | None]:
        """A communicator for one more lane; None where some rank fails, and host memory serves instead."""
        group = self._group
        if self._root is None or not self._root.splits:
            library = nccl.load()
            number = torch.zeros(nccl.ID_BYTES, dtype=torch.uint8, device="cpu")
            if group.rank == 0:
                number = torch.frombuffer(bytearray(library.new_id()), dtype=torch.uint8)
            yield from host.gather([number], [0])
            known = bytes(number.tolist())
            made = yield from self._agree(host, runtime, device, lambda: library.connect(group.size, known, group.rank))
            if made is None or not made.splits:
                return made
            # Nothing else may be under way in a communicator that is split, so the first one does nothing else.
            self._root = made
        root = self._root
        return (yield from self._agree(host, runtime, device, lambda: root.split(group.rank)))

    def _agree(
        self,
        host: Backend,
        runtime: DeviceRuntime,
        device: torch.device,
        make: Callable[[], nccl.Communicator],
    ) -> Coroutine[nccl.Communicator | None]:
        """What `make` returns, if it does so on all ranks; else None, or an error where only NCCL will do."""
        attempt = Attempt(make, runtime, device)
        while not attempt.ended(time.monotonic()):
            yield Wait.POLL
        said = yield from _tell_all(host, self._group, attempt.error)
        wrong = [f"rank {rank}: {text}" for rank, text in zip(self._group.ranks, said, strict=True) if text]
        if not wrong:
            return attempt.made
        if attempt.made is not None:
            attempt.made.abort()
        if self._knobs.cuda_plane == NCCL:
            raise LaunchError(f"HVLIKE_CUDA_PLANE=nccl, but no communicator could be made: {'; '.join(wrong[:3])}")
        self.choice = Choice(STAGED, f"no communicator of NCCL could be made ({wrong[0]})")
        self._say()
        return None


class Attempt:
    """A call that waits for other ranks, in a thread of its own, as the loop must go on."""

    def __init__(self, make: Callable[[], nccl.Communicator], runtime: DeviceRuntime, device: torch.device) -> None:
        self.made: nccl.Communicator | None = None
        self.error = ""
        self._make = make
        self._runtime = runtime
        self._device = device
        self._until = time.monotonic() + _CONNECT_SECONDS
        self._thread = threading.Thread(target=self._run, name="hvlike-nccl-connect", daemon=True)
        self._thread.start()

    def ended(self, now: float) -> bool:
        """Whether it has ended or has been given up."""
        if self._thread.is_alive() and now > self._until:
            self.error = f"nothing was heard of the other ranks for {_CONNECT_SECONDS:g} s"
            return True
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # NCCL takes the device that is the current one.
            with self._runtime.use(self._runtime.current_stream(self._device)):
                self.made = self._make()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"[:300]


def _tell_all(host: Backend, group: Group, said: Any, most: int = _RECORD_BYTES) -> Coroutine[list[Any]]:
    """What every rank says, in order; plain values of at most so many bytes."""
    records = [torch.zeros(most, dtype=torch.uint8, device="cpu") for _ in range(group.size)]
    text = json.dumps(said).encode()
    records[group.rank][: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    yield from host.gather(records, list(range(group.size)))
    return [json.loads(bytes(record.tolist()).rstrip(b"\0")) for record in records]

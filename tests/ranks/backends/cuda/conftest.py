"""hvlike with tensors that count as those of a device, and a backend for them: staged, or a NCCL that is none."""

import dataclasses
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.backends.fake_nccl import FakeNccl
from support.backends.late_device import LateDevice

from hvlike.backends.cuda import runtime
from hvlike.collectives.controller.inline_calls import inline_allreduces
from hvlike.collectives.session.context import current
from hvlike.transport.loop.coroutine import Wait
from hvlike.transport.loop.loop import Loop


class OverSockets:
    """Ranks of one host that meet at the first of them.

    Not in MPI: there the streams would block beside the loop, each in its thread, which has hung in one run of many.
    """

    def __init__(self, comm: Any, folder: Path, number: int) -> None:
        """Collective. number: of this meeting."""
        self._rank, self._size = comm.rank, comm.size
        address = str(folder / str(number))
        listener = Listener(address, family="AF_UNIX", backlog=comm.size) if comm.rank == 0 else None
        comm.barrier()
        self._ends: dict[int, Connection] = {}
        if listener is None:
            self._ends[0] = Client(address, family="AF_UNIX")
            self._ends[0].send_bytes(pickle.dumps(comm.rank))
            return
        with listener:
            for _ in range(1, comm.size):
                end = listener.accept()
                self._ends[pickle.loads(end.recv_bytes())] = end

    def allgather(self, value: Any) -> list[Any]:
        """What all ranks have, in their order. Blocks, without a core."""
        if self._rank:
            self._ends[0].send_bytes(pickle.dumps(value))
            found: list[Any] = pickle.loads(self._ends[0].recv_bytes())
            return found
        everybody = [value, *(pickle.loads(self._ends[rank].recv_bytes()) for rank in range(1, self._size))]
        for end in self._ends.values():
            end.send_bytes(pickle.dumps(everybody))
        return everybody

    def close(self) -> None:
        """Hang up."""
        for end in self._ends.values():
            end.close()


class Late(SimpleNamespace):
    """What a test works with."""

    hvd: ModuleType
    device: LateDevice
    nccl: FakeNccl
    backend: str


@pytest.fixture(params=["staged", "nccl"], scope="module")
def late(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[Late]:
    """Every tensor of the host counts as one of a LateDevice."""
    from mpi4py import MPI

    context = current()
    set_state = context.find_set(None, "test")
    executor, site = set_state.executor, set_state.executor.site
    device = LateDevice()
    comm = MPI.COMM_WORLD
    folder = Path(comm.bcast(tempfile.mkdtemp(prefix="hvlike-late-") if comm.rank == 0 else None))
    meetings = [OverSockets(comm, folder, number) for number in range(16)]
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
    left = iter(meetings)
    nccl = FakeNccl(device, lambda number, rank, size: next(left))
    advance = Loop._advance

    def host_work(loop: Loop, rung: bool) -> Wait:
        # Who waits drives the loop, whatever stream he has in use; what a host does there would be put into it.
        with device.aside():
            return advance(loop, rung)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
            patch.setitem(sys.modules, name, nccl)
        patch.setitem(runtime.KINDS, "cpu", lambda: device)
        patch.setattr(Loop, "_advance", host_work)
        # The inline allreduce takes tensors of the host before anybody asks where they are.
        patch.setattr(set_state, "inline", None)
        patch.delitem(inline_allreduces.by_set, 0, raising=False)
        patch.setattr(executor, "_opening", None)
        knobs = dataclasses.replace(site.knobs, cuda_plane=request.param)
        patch.setattr(site, "knobs", knobs)
        patch.setattr(site, "_devices", None)
        hvd.barrier()
        yield Late(hvd=hvd, device=device, nccl=nccl, backend=request.param)
        # What nobody has asked for, the last step of ranks that have joined, must not be in a meeting that is closed.
        device.finish()
        hvd.barrier()
        site.close()
    assert nccl.violations == []
    runtime.forget("cpu")
    for queue in set_state.queues.all():
        if queue.device is not None:
            queue.device.close()
            queue.device = None
    for meeting in meetings:
        meeting.close()

"""hvlike with tensors that count as those of a device, and a plane that takes them: staged, or a NCCL that is none."""

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from planes.cuda.fake_nccl import FakeNccl
from planes.cuda.late_device import LateDevice

from hvlike.collectives.context import current
from hvlike.planes.cuda import runtime
from hvlike.transport import library_claims
from hvlike.transport.loop import Loop
from hvlike.transport.routine import Wait


class OverMpi:
    """Ranks that meet in a communicator of their own."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def allgather(self, value: Any) -> list[Any]:
        found: list[Any] = self._comm.allgather(value)
        return found


class Late(SimpleNamespace):
    """What a test works with."""

    hvd: ModuleType
    device: LateDevice
    nccl: FakeNccl
    plane: str


@pytest.fixture(params=["staged", "nccl", "mpi", "ipc"], scope="module")
def late(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[Late]:
    """Every tensor of the host counts as one of a LateDevice."""
    from mpi4py import MPI

    if request.param == "nccl" and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("the streams of the NCCL that is none meet in MPI, each in its thread")
    context = current()
    membership = context.membership(None, "test")
    executor, site = membership.executor, membership.executor._site
    device = LateDevice()
    # All ranks make them in this order, as MPI wants it.
    comms = [MPI.COMM_WORLD.Dup() for _ in range(16)]
    for comm in comms:
        comm.allgather(0)
    left = iter(comms)
    nccl = FakeNccl(device, lambda number, rank, size: OverMpi(next(left)))
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
        # The express way takes tensors of the host before anybody asks where they are.
        patch.setattr(membership, "express", None)
        patch.setattr(executor, "_opening", None)
        knobs = dataclasses.replace(site.knobs, cuda_plane=request.param, cuda_aware_mpi=True)
        patch.setattr(site, "knobs", knobs)
        # Memory of this device is taken by any MPI, whatever that says.
        patch.setattr(library_claims, "claims_cuda", lambda: None)
        patch.setattr(site, "_devices", None)
        hvd.barrier()
        yield Late(hvd=hvd, device=device, nccl=nccl, plane=request.param)
        # What nobody has asked for, the last step of ranks that have joined, must not be in MPI when it is ended.
        device.finish()
        hvd.barrier()
        site.close()
    runtime.forget("cpu")
    for lane in membership.lanes.all():
        if lane.device is not None:
            lane.device.close()
            lane.device = None
    for comm in comms:
        comm.Free()

"""hvlike with tensors that count as those of a device, and a plane that takes them: staged, or a NCCL that is none."""

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from planes.cuda.fake_nccl import FakeNccl
from planes.cuda.late_device import LateDevice

from hvlike.planes.cuda import runtime
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


@pytest.fixture(params=["staged", "nccl"], scope="module")
def late(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[Late]:
    """hvlike started anew, with every tensor of the host on a LateDevice."""
    from mpi4py import MPI

    hvd.shutdown()
    device = LateDevice()
    # All ranks make them in this order, as MPI wants it.
    comms = [MPI.COMM_WORLD.Dup() for _ in range(8)]
    for comm in comms:
        comm.allgather(0)
    left = iter(comms)
    nccl = FakeNccl(device, lambda number, rank, size: OverMpi(next(left)))
    settings = {"HVLIKE_CUDA_PLANE": request.param, "HVLIKE_EXPRESS": "0"}
    before = {name: os.environ.get(name) for name in settings}
    modules = {name: sys.modules.get(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl")}
    os.environ.update(settings)
    sys.modules.update(dict.fromkeys(modules, nccl))  # type: ignore[dict-item]
    runtime.KINDS["cpu"] = lambda: device
    advance = Loop._advance

    def host_work(loop: Loop, rung: bool) -> Wait:
        # Who waits drives the loop, whatever stream he has in use; what a host does there would be put into it.
        with device.aside():
            return advance(loop, rung)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_advance", host_work)
        hvd.init()
        yield Late(hvd=hvd, device=device, nccl=nccl, plane=request.param)
        hvd.shutdown()
    del runtime.KINDS["cpu"]
    runtime.forget("cpu")
    for table, target in ((before, os.environ), (modules, sys.modules)):
        for name, value in table.items():
            if value is None:
                target.pop(name, None)
            else:
                target[name] = value
    hvd.init()
    for comm in comms:
        comm.Free()

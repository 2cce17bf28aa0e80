"""NCCL takes at most 2048 calls in a group: longer lists are several groups, the same ones on every rank."""

import torch
from support.backends.fake_nccl import FakeNccl
from support.backends.late_device import LateDevice

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import SoloBackend
from hvlike.backends.cuda.nccl import Communicator, Nccl, NcclBackend


class Alone:
    """A meeting of one."""

    def allgather(self, value: object) -> list[object]:
        return [value]


def test_many_tensors_are_reduced_in_several_groups() -> None:
    device = LateDevice()
    nccl = FakeNccl(device, lambda number, rank, size: Alone())
    link = nccl.join(Alone(), 0, 1)
    backend = NcclBackend(SoloBackend(), device, device.home(), (0, 1), Communicator(Nccl(nccl), link), 0.0)
    tensors = [torch.full((2,), float(number)) for number in range(5000)]
    job = backend.allreduce(tensors, Arithmetic(torch.float32, ReduceOp.SUM, postscale=2.0))
    assert list(backend.run(job)) == []
    assert [len(group) for group in link.calls] == [2048, 2048, 904]
    device.drain(backend.stream)
    assert all(tensor.tolist() == [2.0 * number] * 2 for number, tensor in enumerate(tensors))

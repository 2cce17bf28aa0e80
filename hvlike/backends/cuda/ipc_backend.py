"""The ipc backend: ranks of one host that map each other's memory on the GPU, so that nothing leaves it.

    every rank    copies a piece into a buffer that all have mapped      | barrier |
                  adds up its part of all buffers, into a second buffer  | barrier |
                  copies all parts out of the second buffers

Between the steps the hosts wait for their streams and meet. A part of a piece is added up by one rank only. Opt-in
(HVLIKE_CUDA_PLANE=ipc) until somebody has measured where it is faster than to go through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend
from hvlike.backends.cuda.mpi_backend import fold
from hvlike.backends.cuda.nccl_backend import recipe_of
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.backends.cuda.staged_backend import PIECE_BYTES, StagedBackend, pieces_of, scale_
from hvlike.backends.network.partition import message_length
from hvlike.transport.loop.coroutine import Coroutine, Wait

_ELEMENTS = 1000


def prove(plane: DeviceBackend, place: tuple[int, int], errors: tuple[type[Exception], ...]) -> Coroutine[str]:
    """Reduce something small on the devices; why that has failed, empty if it has not. A job of the plane; collective.

    place: rank in the group, and its size. errors: what the plane raises where it cannot work.
    """
    rank, size = place
    probe = torch.full((_ELEMENTS,), rank + 1, dtype=torch.int64, device=plane.home)
    seen: list[int] = []

    def look(host: Backend, copies: Sequence[torch.Tensor]) -> Coroutine[None]:
        seen.extend(value for copy in copies for value in copy.tolist())
        yield from ()

    try:
        yield from plane.allreduce([probe], Arithmetic(torch.int64, ReduceOp.SUM))
    except errors as error:
        return f"{type(error).__name__}: {error}"
    yield from plane.on_host([probe], look)
    expected = size * (size + 1) // 2
    wrong = [value for value in seen if value != expected]
    return f"{wrong[0]} came out of a sum that is {expected}" if wrong else ""


BUFFER_BYTES = 2 * PIECE_BYTES
"""Of each rank: a piece, and behind it the results of its parts."""

_FLAG = Arithmetic(torch.int32, ReduceOp.SUM)


class IpcBackend(StagedBackend):
    """See the head of this file. Reductions go this way; all else is staged."""

    def __init__(
        self,
        host: Backend,
        runtime: DeviceRuntime,
        device: torch.device,
        place: tuple[int, int],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """place: rank in the group, and its size. buffers: of all ranks, BUFFER_BYTES bytes each, mapped here."""
        super().__init__(host, runtime, device, place[0])
        self._size = place[1]
        self._buffers = list(buffers)

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        recipe = recipe_of(arithmetic, self._size)
        if recipe is None:
            yield from super()._allreduce(tensors, arithmetic)
            return
        # Whoever begins a job does so while the one before may still use the buffers; the loop runs them in turn.
        yield Wait.AGAIN
        flats = [recipe.view(tensor) for tensor in tensors if len(tensor)]
        scale_(flats, recipe.before)
        for runs in pieces_of(flats):
            dtype, length = flats[0].dtype, message_length(runs)
            nbytes = length * dtype.itemsize
            sent = [buffer[:nbytes].view(dtype) for buffer in self._buffers]
            results = [buffer[PIECE_BYTES : PIECE_BYTES + nbytes].view(dtype) for buffer in self._buffers]
            slices = [flats[run.piece][run.start : run.stop] for run in runs]
            sizes = [len(each) for each in slices]
            for own, each in zip(torch.split(sent[self._rank], sizes), slices, strict=True):
                own.copy_(each)
            yield from self._meet()
            bounds = [length * rank // self._size for rank in range(self._size + 1)]
            start, stop = bounds[self._rank], bounds[self._rank + 1]
            fold([each[start:stop] for each in sent], results[self._rank][start:stop], recipe)
            # Who passes this has read what others sent, and who comes to the next first one what others have made.
            yield from self._meet()
            whole = torch.cat([results[rank][bounds[rank] : bounds[rank + 1]] for rank in range(self._size)])
            for each, result in zip(slices, torch.split(whole, sizes), strict=True):
                each.copy_(result)
        scale_(flats, recipe.after)

    def _meet(self) -> Coroutine[None]:
        """Wait until the streams of all ranks have come as far as this."""
        ready = self.runtime.record(self.stream)
        yield Wait.AGAIN
        while not self.runtime.has_passed(ready):
            yield Wait.POLL
        flag = torch.ones(1, dtype=torch.int32, device="cpu")
        yield from self.beside(self.host.allreduce([flag], _FLAG))

    def close(self) -> None:
        """See DeviceBackend; also lets go of the other ranks' memory."""
        super().close()
        self._buffers = []

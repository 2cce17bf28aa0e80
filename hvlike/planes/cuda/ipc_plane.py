"""The ipc plane: ranks of one host that map each other's memory on the GPU, so that nothing leaves it.

    every rank    copies a piece into a buffer that all have mapped      | barrier |
                  adds up its part of all buffers, into a second buffer  | barrier |
                  copies all parts out of the second buffers

Between the steps the hosts wait for their streams and meet. A part of a piece is added up by one rank only. Opt-in
(HVLIKE_CUDA_PLANE=ipc) until somebody has measured where it is faster than to go through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.cuda.folding import fold
from hvlike.planes.cuda.nccl_reduction import recipe_of
from hvlike.planes.cuda.runtime import DeviceRuntime
from hvlike.planes.cuda.scaling import scale_
from hvlike.planes.cuda.staged import PIECE_BYTES, StagedPlane, pieces_of
from hvlike.planes.ops import ReduceOp
from hvlike.planes.partition import message_length
from hvlike.planes.plane import Plane
from hvlike.transport.routine import Routine, Wait

BUFFER_BYTES = 2 * PIECE_BYTES
"""Of each rank: a piece, and behind it the results of its parts."""

_FLAG = Arithmetic(torch.int32, ReduceOp.SUM)


class IpcPlane(StagedPlane):
    """See the head of this file. Reductions go this way; all else is staged."""

    def __init__(
        self,
        host: Plane,
        runtime: DeviceRuntime,
        device: torch.device,
        place: tuple[int, int],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """place: rank in the group, and its size. buffers: of all ranks, BUFFER_BYTES bytes each, mapped here."""
        super().__init__(host, runtime, device, place[0])
        self._size = place[1]
        self._buffers = list(buffers)

    def _allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Routine[None]:
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

    def _meet(self) -> Routine[None]:
        """Wait until the streams of all ranks have come as far as this."""
        ready = self.runtime.record(self.stream)
        yield Wait.AGAIN
        while not self.runtime.has_passed(ready):
            yield Wait.POLL
        flag = torch.ones(1, dtype=torch.int32, device="cpu")
        yield from self.beside(self.host.allreduce([flag], _FLAG))

    def close(self) -> None:
        """See DevicePlane; also lets go of the other ranks' memory."""
        super().close()
        self._buffers = []

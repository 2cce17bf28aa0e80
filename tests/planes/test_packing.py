"""Small tensors travel together, large ones as they are."""

import pytest
import torch

from hvlike.planes.arithmetic import Arithmetic
from hvlike.planes.ops import ReduceOp
from hvlike.planes.packing import SMALL_BYTES, Packer, small_ones
from hvlike.planes.plane import SoloPlane
from hvlike.transport.routine import Routine

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], []),  # one alone gains nothing from a copy
        ([5, 6], [0, 1]),
        ([5, SMALL_BYTES // 4, 6], [0, 2]),
        ([0, 5, 6], [1, 2]),
        ([SMALL_BYTES // 4] * 3, []),
    ],
)
def test_small_tensors_are_found(lengths: list[int], expected: list[int]) -> None:
    assert small_ones(lengths, 4) == expected


class RecordingPlane(SoloPlane):
    """Notes what it is asked to reduce."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def allreduce(self, tensors: list[torch.Tensor], arithmetic: Arithmetic) -> Routine[None]:  # type: ignore[override]
        self.lengths.append([len(tensor) for tensor in tensors])
        yield from super().allreduce(tensors, arithmetic)


def run(routine: Routine[None]) -> None:
    for _ in routine:
        pass


def test_results_come_back_into_the_tensors_and_the_buffer_follows_changed_lengths() -> None:
    plane, packer = RecordingPlane(), Packer()
    double = Arithmetic(torch.float32, ReduceOp.SUM, postscale=2.0)
    for lengths in ([3, 70_000, 5], [3, 70_000, 5], [4, 4]):
        tensors = [torch.full((length,), float(length)) for length in lengths]
        run(packer.allreduce(plane, tensors, double))
        for tensor, length in zip(tensors, lengths, strict=True):
            assert torch.equal(tensor, torch.full((length,), 2.0 * length))
    assert plane.lengths == [[8, 70_000], [8, 70_000], [8]]

"""Small tensors travel together, large ones as they are."""

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import SoloBackend
from hvlike.backends.fusion_buffer import SMALL_BYTES, FusionBuffer, small_ones
from hvlike.transport.loop.coroutine import Coroutine


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


class RecordingBackend(SoloBackend):
    """Notes what it is asked to reduce."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def allreduce(self, tensors: list[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:  # type: ignore[override]
        self.lengths.append([len(tensor) for tensor in tensors])
        yield from super().allreduce(tensors, arithmetic)


def run(coroutine: Coroutine[None]) -> None:
    for _ in coroutine:
        pass


def test_results_come_back_into_the_tensors_and_the_buffer_follows_changed_lengths() -> None:
    backend, packer = RecordingBackend(), FusionBuffer()
    double = Arithmetic(torch.float32, ReduceOp.SUM, postscale=2.0)
    for lengths in ([3, 70_000, 5], [3, 70_000, 5], [4, 4]):
        tensors = [torch.full((length,), float(length)) for length in lengths]
        run(packer.allreduce(backend, tensors, double))
        for tensor, length in zip(tensors, lengths, strict=True):
            assert torch.equal(tensor, torch.full((length,), 2.0 * length))
    assert backend.lengths == [[8, 70_000], [8, 70_000], [8]]

"""Compressors of a program through failed steps, joins and overlap."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Doubles, Run
from support.training.problem import same_on_all_ranks
from torch import Tensor

from hvlike.errors import HorovodInternalError, MismatchError

SHAPES = [(20, 30), (6,), (12, 20)]


class Breaking(Doubles):
    """Breaks before the reduction or after it."""

    breaks = ""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if self.breaks == "before":
            raise HorovodInternalError("broken before")
        return super().compress(tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        if self.breaks == "after":
            raise HorovodInternalError("broken after")
        return super().decompress(tensor, ctx)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_step_that_fails_on_all_ranks_can_be_taken_again(hvd: ModuleType, place: str) -> None:
    run = Run(hvd, Breaking(), SHAPES)
    run.step(0)
    run.compression.breaks = place
    with pytest.raises(HorovodInternalError, match=f"broken {place}"):
        run.step(1)
    run.compression.breaks = ""
    # As if nothing had happened.
    for one, other in zip(run.step(1), Run(hvd, Breaking(), SHAPES).step(1), strict=True):
        assert torch.equal(one, other)


@pytest.mark.mpi(min_size=2)
def test_ranks_go_on_together_after_a_step_that_failed_on_one(hvd: ModuleType) -> None:
    run = Run(hvd, Breaking(), SHAPES)
    for step in range(3):
        run.step(step)
    run.compression.breaks = "after" if hvd.rank() == 0 else ""
    if hvd.rank() == 0:
        with pytest.raises(HorovodInternalError, match="broken"):
            run.step(3)
    else:
        run.step(3)
    run.compression.breaks = ""
    with pytest.raises(HorovodInternalError, match="no rank can go on"):
        run.step(4)
    for step in (5, 6):
        assert same_on_all_ranks(run.step(step))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_join_keep_in_step(hvd: ModuleType) -> None:
    run = Run(hvd, Doubles(), SHAPES)
    for step in range(5 if hvd.rank() else 1):
        run.step(step)
    hvd.join()
    for step in (5, 6):
        assert same_on_all_ranks(run.step(step))


def test_overlap_changes_nothing(hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]) -> None:
    results: list[list[Tensor]] = []
    for overlap in ("0", "1"):
        restarted({"HVLIKE_OVERLAP": overlap})
        run = Run(hvd, Doubles(), SHAPES, groups=2)
        for step in range(4):
            run.step(step)
        assert same_on_all_ranks(run.parameters)
        results.append([parameter.detach() for parameter in run.parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi(min_size=2)
def test_different_compressors_are_an_error_on_every_rank_and_the_job_goes_on(hvd: ModuleType) -> None:
    for others in (Breaking(), hvd.Compression.none):
        run = Run(hvd, Doubles() if hvd.rank() == 0 else others, SHAPES)
        with pytest.raises(MismatchError, match=r"(?s)Mismatched settings.*rank 0 .*rank 1 "):
            run.step(0)
    assert same_on_all_ranks(Run(hvd, Doubles(), SHAPES).step(0))

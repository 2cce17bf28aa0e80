"""MPI with memory of GPUs, and memory that ranks map, are tried out, and not used when the trial goes wrong."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planes.cuda.conftest import Late
from planes.jobs import run

from hvlike.collectives.context import current
from hvlike.config import Knobs
from hvlike.errors import LaunchError
from hvlike.planes.cuda import folding, ipc_plane, mpi_plane
from hvlike.planes.cuda.choice import Choice, DeviceFacts, choose_plane
from hvlike.planes.cuda.ipc_plane import IpcPlane
from hvlike.planes.cuda.mpi_plane import MpiPlane
from hvlike.planes.cuda.opening import DevicePlanes
from hvlike.planes.cuda.staged import StagedPlane
from hvlike.planes.plane import Plane
from hvlike.transport import library_claims
from hvlike.transport.routine import Routine

WILLING = DeviceFacts("one", "gpu-a", 0, "CuPy is not installed", "")
UNASKED = DeviceFacts("one", "gpu-a", 22703, "")
OTHER = DeviceFacts("one", "gpu-b", 22703, "", "")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        ([WILLING, WILLING], "auto", "mpi"),
        ([WILLING, WILLING], "mpi", "mpi"),
        ([WILLING, WILLING], "staged", "staged"),
        ([WILLING, UNASKED], "auto", "staged"),
        ([OTHER, WILLING._replace(nccl=22703)], "auto", "nccl"),
        ([OTHER, WILLING._replace(nccl=22703)], "mpi", "mpi"),
        ([WILLING], "mpi", "solo"),
    ],
)
def test_it_is_taken_where_nccl_cannot_serve(facts: list[DeviceFacts], wanted: str, expected: str) -> None:
    assert choose_plane(facts, range(len(facts)), wanted).plane == expected


@pytest.mark.pure
def test_insisting_on_it_without_asking_for_it_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"HVLIKE_CUDA_PLANE=mpi, but on rank 7 HVLIKE_CUDA_AWARE_MPI=1 is not set"):
        choose_plane([WILLING, UNASKED], [3, 7], "mpi")


def opened(late: Late, wanted: str) -> tuple[list[Any], Choice | None]:
    """A plane, or the error, of planes beside the lanes, which an error would break; and what was chosen."""
    knobs = dataclasses.replace(Knobs(), cuda_plane=wanted, cuda_aware_mpi=True)
    devices = DevicePlanes(current().membership(None, "test").group, knobs, "one host")
    found: list[Any] = []

    def job(host: Plane) -> Routine[None]:
        try:
            found.append((yield from devices.open(host, late.device, None)))
        except LaunchError as error:
            found.append(str(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late.device, "identity", lambda device: "shared by all")
        run(job)
    return found, devices.choice


@pytest.fixture
def wrong(late: Late, monkeypatch: pytest.MonkeyPatch) -> Late:
    """The last rank adds up wrongly."""
    if late.hvd.rank() == late.hvd.size() - 1:

        def forget(ordered: Sequence[torch.Tensor], result: torch.Tensor, recipe: Any) -> None:
            folding.fold(ordered[1:], result, recipe)

        monkeypatch.setattr(mpi_plane, "fold", forget)
        monkeypatch.setattr(ipc_plane, "fold", forget)
    return late


@pytest.mark.mpi(min_size=2)
def test_what_has_been_proved_is_used(late: Late) -> None:
    for wanted, kind in (("mpi", MpiPlane), ("ipc", IpcPlane)):
        (plane,), choice = opened(late, wanted)
        assert type(plane) is kind
        assert choice == (wanted, f"HVLIKE_CUDA_PLANE={wanted}")


@pytest.mark.mpi(min_size=2)
def test_a_trial_that_fails_on_one_rank_fails_on_all(wrong: Late) -> None:
    (plane,), choice = opened(wrong, "auto")
    assert type(plane) is StagedPlane
    assert choice is not None
    assert choice.plane == "staged"
    assert "came out of a sum that is" in choice.reason
    for wanted in ("mpi", "ipc"):
        (error,), _ = opened(wrong, wanted)
        assert error.startswith(f"HVLIKE_CUDA_PLANE={wanted}, but its trial has failed: rank")


@pytest.mark.mpi(min_size=2)
def test_memory_that_one_rank_cannot_map_is_refused_on_all(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(shared: bytes) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid device context")

    if late.hvd.rank() == 0:
        monkeypatch.setattr(late.device, "attach", cannot)
    (error,), _ = opened(late, "ipc")
    assert "HVLIKE_CUDA_PLANE=ipc, but its trial has failed: rank 0: RuntimeError: CUDA error" in error


@pytest.mark.pure
def test_ranks_of_several_hosts_cannot_map_each_others_memory() -> None:
    with pytest.raises(LaunchError, match="one host, and these are on one, two"):
        choose_plane([WILLING, WILLING._replace(host="two")], [0, 1], "ipc")


@pytest.mark.mpi(min_size=2)
def test_a_library_that_says_no_is_not_tried(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_claims, "claims_cuda", lambda: False)
    (error,), _ = opened(late, "mpi")
    assert "the MPI library says that it does not take memory of a GPU" in error
    (plane,), _ = opened(late, "auto")
    assert type(plane) is StagedPlane


@pytest.mark.mpi(min_size=2)
def test_the_collectives_of_these_tests_go_this_way(late: Late) -> None:
    late.hvd.allreduce(torch.ones(3), name="way")
    plane = current().membership(None, "test").lanes.first.device
    assert isinstance(plane, MpiPlane) == (late.plane == "mpi")
    assert isinstance(plane, IpcPlane) == (late.plane == "ipc")

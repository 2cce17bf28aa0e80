"""MPI with memory of GPUs, and memory that ranks map, are tried out, and not used when the trial goes wrong."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks.backends.cuda.conftest import Late
from support.backends.jobs import run

from hvlike.backends.base import Backend
from hvlike.backends.cuda import ipc_backend, mpi_backend
from hvlike.backends.cuda.ipc_backend import IpcBackend
from hvlike.backends.cuda.mpi_backend import MpiBackend
from hvlike.backends.cuda.opening import DeviceBackends
from hvlike.backends.cuda.selection import Choice, DeviceFacts, choose_backend
from hvlike.backends.cuda.staged_backend import StagedBackend
from hvlike.collectives.session.context import current
from hvlike.config import Config
from hvlike.errors import LaunchError
from hvlike.transport.host import mpi_library
from hvlike.transport.loop.coroutine import Coroutine

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
    assert choose_backend(facts, range(len(facts)), wanted).plane == expected


@pytest.mark.pure
def test_insisting_on_it_without_asking_for_it_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"HVLIKE_CUDA_PLANE=mpi, but on rank 7 HVLIKE_CUDA_AWARE_MPI=1 is not set"):
        choose_backend([WILLING, UNASKED], [3, 7], "mpi")


def opened(late: Late, wanted: str) -> tuple[list[Any], Choice | None]:
    """A plane, or the error, of planes beside the lanes, which an error would break; and what was chosen."""
    knobs = dataclasses.replace(Config(), cuda_plane=wanted, cuda_aware_mpi=True)
    devices = DeviceBackends(current().set_state(None, "test").group, knobs, "one host")
    found: list[Any] = []

    def job(host: Backend) -> Coroutine[None]:
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
            mpi_backend.fold(ordered[1:], result, recipe)

        monkeypatch.setattr(mpi_backend, "fold", forget)
        monkeypatch.setattr(ipc_backend, "fold", forget)
    return late


@pytest.mark.mpi(min_size=2)
def test_what_has_been_proved_is_used(late: Late) -> None:
    for wanted, kind in (("mpi", MpiBackend), ("ipc", IpcBackend)):
        (plane,), choice = opened(late, wanted)
        assert type(plane) is kind
        assert choice == (wanted, f"HVLIKE_CUDA_PLANE={wanted}")


@pytest.mark.mpi(min_size=2)
def test_a_trial_that_fails_on_one_rank_fails_on_all(wrong: Late) -> None:
    (plane,), choice = opened(wrong, "auto")
    assert type(plane) is StagedBackend
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
        choose_backend([WILLING, WILLING._replace(host="two")], [0, 1], "ipc")


@pytest.mark.mpi(min_size=2)
def test_a_library_that_says_no_is_not_tried(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "claims_cuda", lambda: False)
    (error,), _ = opened(late, "mpi")
    assert "the MPI library says that it does not take memory of a GPU" in error
    (plane,), _ = opened(late, "auto")
    assert type(plane) is StagedBackend


@pytest.mark.mpi(min_size=2)
def test_the_collectives_of_these_tests_go_this_way(late: Late) -> None:
    late.hvd.allreduce(torch.ones(3), name="way")
    plane = current().set_state(None, "test").lanes.first.device
    assert isinstance(plane, MpiBackend) == (late.plane == "mpi")
    assert isinstance(plane, IpcBackend) == (late.plane == "ipc")

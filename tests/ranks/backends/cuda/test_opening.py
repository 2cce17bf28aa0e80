"""A communicator that cannot be made on one rank is none on all: host memory serves, or an error says why not."""

import dataclasses

import pytest
import torch
from ranks.backends.cuda.conftest import Late
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.cuda.device_backend import DeviceBackend
from hvlike.backends.cuda.opening import DeviceBackends
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.plan import Entry
from hvlike.collectives.session.context import current
from hvlike.config import Config
from hvlike.errors import LaunchError, ShutdownError
from hvlike.training.gradients.planned_reducer import PlannedReducer
from hvlike.transport.loop.coroutine import Coroutine

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def failing(late: Late, monkeypatch: pytest.MonkeyPatch) -> Late:
    """The last rank can make no communicator."""
    monkeypatch.setattr(late.nccl, "fails", late.hvd.rank() == late.hvd.size() - 1)
    return late


def backends(wanted: str) -> DeviceBackends:
    group = current().find_set(None, "test").group
    # As if every rank had a host of its own: here they share the device.
    return DeviceBackends(group, dataclasses.replace(Config(), cuda_plane=wanted), f"host {group.rank}")


def test_where_any_backend_will_do_host_memory_serves(failing: Late) -> None:
    devices, opened = backends("auto"), []

    def job(host: Backend) -> Coroutine[None]:
        opened.append((yield from devices.open(host, failing.device, None)))

    run(job)
    assert type(opened[0]) is DeviceBackend
    assert devices.choice is not None
    assert devices.choice.backend == "staged"
    assert "NCCL_ERROR_SYSTEM_ERROR" in devices.choice.reason


def test_where_only_nccl_will_do_every_rank_gets_the_error(late: Late) -> None:
    """Beside the queues, which an error would break for the tests that follow."""
    late.nccl.fails = late.hvd.rank() == 0
    caught = []
    devices = backends("nccl")

    def job(host: Backend) -> Coroutine[None]:
        try:
            yield from devices.open(host, late.device, None)
        except LaunchError as error:
            caught.append(str(error))

    run(job)
    late.nccl.fails = False
    assert "HVLIKE_CUDA_PLANE=nccl" in caught[0]
    assert "rank 0: RuntimeError: NCCL_ERROR_SYSTEM_ERROR" in caught[0]


def test_each_queue_has_a_communicator_which_ends_in_peace_once_its_work_is_done(late: Late) -> None:
    devices, links, opened = backends("nccl"), late.nccl.links, []
    before = len(links)
    tensor = torch.full((3,), late.hvd.rank() + 1.0)

    def job(host: Backend) -> Coroutine[None]:
        opened.append((yield from devices.open(host, late.device, None)))
        opened.append((yield from devices.open(host, late.device, None)))
        yield from opened[0].run(opened[0].allreduce([tensor], Arithmetic(torch.float32, ReduceOp.SUM)))

    run(job)
    mine = links[before:]
    assert len(mine) == 2
    for each in opened:
        each.abort(ShutdownError("the end"))
    devices.close()
    assert all(each.destroyed.is_set() for each in mine)
    assert not any(each.aborted.is_set() for each in mine)
    size = late.hvd.size()
    assert torch.equal(tensor, torch.full((3,), size * (size + 1) / 2))


def test_ranks_that_nccl_takes_for_hosts_of_their_own_may_share_a_gpu(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = current().find_set(None, "test").group
    monkeypatch.setattr(late.device, "identity", lambda device: "the one GPU")
    monkeypatch.setenv("NCCL_HOSTID", f"host of rank {group.rank}")
    devices, opened = DeviceBackends(group, dataclasses.replace(Config(), cuda_plane="auto"), "one host"), []

    def job(host: Backend) -> Coroutine[None]:
        opened.append((yield from devices.open(host, late.device, None)))

    run(job)
    assert devices.choice is not None
    assert devices.choice.backend == "nccl"
    opened[0].abort(ShutdownError("the end"))
    devices.close()


def test_the_job_goes_on_where_the_backend_that_is_wanted_cannot_serve(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late.backend != "nccl":
        pytest.skip("any backend will do there")
    hvd, set_state = late.hvd, current().find_set(None, "test")
    with monkeypatch.context() as patch:
        patch.setattr(set_state.queues.first, "device", None)
        patch.setattr(set_state.executor.site, "_devices", None)
        patch.setattr(late.nccl, "fails", hvd.rank() == 0)
        with pytest.raises(LaunchError, match="no communicator could be made"):
            hvd.allreduce(torch.ones(3), name="refused")
        hvd.barrier()
        entries = [Entry("p", (3,), torch.float32, torch.device("cpu"))]
        reducer = PlannedReducer(entries, ReductionSettings(hvd.Sum, hvd.size()), name="refused")
        with pytest.raises(LaunchError, match="no communicator could be made"):
            reducer.finish([torch.ones(3)])
        hvd.barrier()
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum, name="served"), torch.full((3,), float(hvd.size())))

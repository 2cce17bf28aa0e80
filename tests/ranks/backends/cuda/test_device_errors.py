"""An error of one rank's device ends the operation on every rank, and the job goes on."""

import pytest
import torch
from ranks.backends.cuda.conftest import Late

from hvlike import Sum
from hvlike.collectives.persistent.bucket import ReductionSettings
from hvlike.collectives.requests.plan import Entry
from hvlike.collectives.session.context import current
from hvlike.errors import HorovodInternalError
from hvlike.training.gradients.planned_reducer import PlannedReducer


@pytest.mark.mpi(min_size=2)
def test_an_error_of_nccl_is_raised_on_every_rank_and_a_new_queue_follows(late: Late) -> None:
    if late.backend != "nccl":
        pytest.skip("the other backends have no communicator")
    hvd = late.hvd
    entries = [Entry("p", (4,), torch.float32, torch.device("cpu"))]
    reducer = PlannedReducer(entries, ReductionSettings(Sum, hvd.size()), name="failing")
    gradient = torch.ones(4)
    reducer.finish([gradient])
    assert torch.equal(gradient, torch.full((4,), float(hvd.size())))
    schedule = reducer.schedule
    assert schedule is not None
    device = schedule.device
    assert device is not None
    # The first step is over everywhere.
    hvd.barrier()
    if hvd.rank() == 0:
        late.nccl.links[-1].failure = RuntimeError("NCCL_ERROR_INTERNAL_ERROR: internal error")
    # No rank begins the next step before all have heard of it; the device is watched while they wait.
    assert current().fabric.loop.wait(lambda: device.broken is not None, 60.0)
    with pytest.raises(HorovodInternalError, match="internal error") as caught:
        reducer.finish([gradient])
    assert ("on rank 0: " in str(caught.value)) == (hvd.rank() != 0)
    hvd.barrier()
    # The other ranks aborted what was healthy on their side, as rank 0 had told them.
    late.nccl.violations.clear()
    gradient.fill_(2.0)
    reducer.finish([gradient])
    assert torch.equal(gradient, torch.full((4,), 2.0 * hvd.size()))
    reducer.drop()

"""A call in inference mode may be carried out by a thread that is not in it, and the other way round."""

import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.collectives.inputs import DTYPES, LAYOUTS, reduced, same
from torch import Tensor

from hvlike.collectives.requests.reduction import Operand


@pytest.mark.parametrize("pause", [0.0, 0.005], ids=["this thread", "the loop's thread"])
def test_groups_are_reduced_and_broadcast(hvd: ModuleType, pause: float) -> None:
    for number in range(6):
        with torch.inference_mode(number % 3 < 2):
            contributions = [torch.full((3, 500 + number // 2), rank + 1.0) for rank in range(hvd.size())]
            given = [contributions[hvd.rank()].clone(), contributions[hvd.rank()].t().contiguous().t()]
            handles = [hvd.grouped_allreduce_async(given, op=hvd.Sum), hvd.broadcast_async(given[1], 0)]
            time.sleep(pause)
            for total in hvd.synchronize(handles[0]):
                same(total, reduced(hvd.Sum, contributions))
            same(hvd.synchronize(handles[1]), contributions[0])
            for each in given:
                hvd.allreduce_(each, op=hvd.Max)
                same(each, contributions[-1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_operand_made_of_an_inference_tensor_is_written_outside(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    with torch.inference_mode():
        tensor = layout(torch.ones(2, 1, 3, 4).to(dtype))
        operand = Operand(tensor, None)
    operand.flat.zero_()
    operand.write_back()
    assert not tensor.any()

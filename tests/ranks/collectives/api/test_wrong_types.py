"""Arguments of a wrong type: a TypeError, which is a ValueError too, on the rank that passes them; the job goes on."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

WRONG: dict[str, Callable[[ModuleType], Any]] = {
    "got list": lambda hvd: hvd.allreduce([1]),
    "got int": lambda hvd: hvd.broadcast(3, root_rank=0),
    "expected numbers, got prescale_factor='a'": lambda hvd: hvd.allreduce(torch.ones(2), prescale_factor="a"),
    "expected numbers, got prescale_factor=1.0, postscale_factor=None": lambda hvd: hvd.reducescatter(
        torch.ones(4), postscale_factor=None
    ),
    "op 'sum' is not a reduction": lambda hvd: hvd.allreduce(torch.ones(2), op="sum"),
    "name has to be a string, got 3": lambda hvd: hvd.allgather(torch.ones(2), name=3),
    "expected a list of tensors, got int": lambda hvd: hvd.grouped_allreduce(7),
    "compress": lambda hvd: hvd.allreduce(torch.ones(2), compression=5),
    "expects a torch.optim.Optimizer, got Linear": lambda hvd: hvd.DistributedOptimizer(torch.nn.Linear(1, 1)),
    "expected a ProcessSet, got list": lambda hvd: hvd.allreduce(torch.ones(2), process_set=[0]),
    "expects tensors, got a module": lambda hvd: hvd.broadcast_parameters(torch.nn.Linear(1, 1), 0),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_type_is_a_type_error(hvd: ModuleType, text: str) -> None:
    with pytest.raises(TypeError, match=text) as raised:
        WRONG[text](hvd)
    assert isinstance(raised.value, ValueError)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()

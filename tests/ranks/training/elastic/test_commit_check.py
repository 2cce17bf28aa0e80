"""The first commits after each start are compared between ranks: wrong sums after a failure do not stay unnoticed."""

from types import ModuleType

import pytest
import torch
from torch import nn

from hvlike.elastic import TorchState, run
from hvlike.errors import HorovodInternalError

pytestmark = pytest.mark.mpi(min_size=2)
STEPS = 6


@run
def train(state: TorchState, hvd: ModuleType, faults: dict[int, object]) -> None:
    """Each step adds 1 to the parameters of all ranks; does what a fault says, once, at the step it is for."""
    while state.step < STEPS:
        state.step += 1
        fault = faults.pop(state.step, None)
        if isinstance(fault, Exception):
            raise fault
        with torch.no_grad():
            for each in state.model.parameters():
                each += 1 + (hvd.rank() == fault)
        state.commit()


def trained(hvd: ModuleType, faults: dict[int, object]) -> float:
    """What the last parameter has got."""
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    train(TorchState(model=model, step=0), hvd, faults)
    return model.bias[1].item()


def test_a_wrong_sum_after_a_failure_is_taken_back(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    # The last rank gets another value in the first step after the restart.
    again = {3: HorovodInternalError("injected")}
    faults = again | {4: hvd.size() - 1}
    assert trained(hvd, faults) == STEPS
    assert not faults
    text = next(each for each in caplog.messages if "MismatchError" in each)
    assert "commit 4: parameter model.weight differs between ranks" in text
    assert f"on ranks [{hvd.size() - 1}]" in text
    assert "2 of 2 parameters differ" in text


def test_a_difference_that_does_not_go_away_ends_the_run(hvd: ModuleType) -> None:
    class Always(dict[int, object]):
        def pop(self, step: int, *_: object) -> object:
            return super().pop(step, hvd.size() - 1 if step > 3 else None)

    with pytest.raises(HorovodInternalError, match=r"gives up: 4 failures .* commit 4: parameter model\.weight"):
        trained(hvd, Always({3: HorovodInternalError("injected")}))


def test_ranks_that_train_by_themselves_are_warned_once(hvd: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    faults: dict[int, object] = {1: hvd.size() - 1, 2: hvd.size() - 1, 4: HorovodInternalError("injected"), 5: 0}
    # After the restart all have what rank 0 has; in step 5 it adds 2.
    assert trained(hvd, faults) == STEPS + (hvd.rank() == 0)
    warned = [each for each in caplog.messages if "differs between ranks" in each]
    assert len(warned) == (hvd.rank() == 0)
    assert all("all start from those of rank 0" in each for each in warned)

"""synchronize() and then a plain step(): one warning with Horovod's text, and no second reduction."""

import warnings
from types import ModuleType

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, share, whole_batch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.training.distributed_optimizer import DistributedOptimizer, clip_grad_norm_

TEXT = (
    r"optimizer.step\(\) called without optimizer.skip_synchronize\(\) context after optimizer.synchronize\(\). "
    "This can cause training slowdown."
)


def test_exactly_one_warning_and_gradients_are_reduced_once(hvd: ModuleType) -> None:
    results = []
    for explicit in (False, True):
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=ReduceOp.SUM)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, share(hvd, whole_batch(step))).backward()
                if explicit:
                    optimizer.synchronize()
                optimizer.step()
        assert [str(each.message).startswith("optimizer.step() called without") for each in caught] == [True] * explicit
        results.append(list(model.parameters()))
    assert largest_difference(*results) == 0.0


def test_the_warning_points_to_the_line_of_the_user(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=TEXT) as caught:
        optimizer.step()
    assert caught[0].filename == __file__


def test_no_warning_where_the_order_is_right(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        if step % 2:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()

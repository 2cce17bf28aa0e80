"""hvlike.clip_grad_norm_ clips the gradients of all ranks, by the norm that one process would have."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import largest_difference, loss_of, make_model, same_on_all_ranks, share, whole_batch
from support.training.ways import Wrapped

from hvlike import DistributedOptimizer, allgather_object, clip_grad_norm_
from hvlike.errors import UsageError

pytestmark = pytest.mark.differs_by_overlap


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    ("way", "wrapper", "foreach"),
    [
        ("optimizer", {}, None),
        ("optimizer", {}, True),
        ("optimizer", {}, False),
        ("zero", {}, None),
        ("zero", {"parameters_as_bucket_view": True}, None),
    ],
)
def test_the_norm_is_that_of_one_process(
    hvd: ModuleType, way: str, wrapper: dict[str, Any], foreach: bool | None, norm_type: float
) -> None:
    model, expected = make_model(), make_model()
    wrapped = Wrapped(way, model, wrapper=wrapper, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    given = {} if way == "zero" else {"foreach": foreach}
    for step in range(3):
        wrapped.optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        norm = clip_grad_norm_(wrapped.optimizer, 0.01, norm_type, **given)
        wrapped.optimizer.step()
        plain.zero_grad()
        loss_of(expected, whole_batch(step)).backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01, norm_type)
        plain.step()
        assert norm.item() == pytest.approx(expected_norm.item(), rel=1e-5)
        assert allgather_object(norm.item()) == [norm.item()] * hvd.size()
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6
    assert same_on_all_ranks(model.parameters())


def test_it_may_be_called_twice_and_after_synchronize(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    loss_of(model, share(hvd, whole_batch())).backward()
    optimizer.synchronize()
    first = clip_grad_norm_(optimizer, 1e9)
    second = clip_grad_norm_(optimizer, 1e9)
    optimizer.step()
    assert first.item() == second.item()


@pytest.mark.parametrize("way", ["optimizer", "zero"])
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(hvd: ModuleType, way: str) -> None:
    model = make_model()
    wrapped = Wrapped(way, model)
    loss = loss_of(model, share(hvd, whole_batch()))
    (loss * float("nan") if hvd.rank() == 0 else loss).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(wrapped.optimizer, 1.0, error_if_nonfinite=True)
    wrapped.optimizer.zero_grad()
    assert largest_difference(model.parameters(), make_model().parameters()) == 0
    loss_of(model, share(hvd, whole_batch())).backward()
    clip_grad_norm_(wrapped.optimizer, 1.0, error_if_nonfinite=True)
    wrapped.optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_a_plain_optimizer_is_refused(hvd: ModuleType) -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"expects the optimizer that hvd.DistributedOptimizer returned, got SGD"):
        clip_grad_norm_(optimizer, 1.0)


def test_inside_no_sync_it_is_refused(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with optimizer.no_sync():
        loss_of(model, share(hvd, whole_batch())).backward()
        with pytest.raises(UsageError, match=r"hvlike.clip_grad_norm_ was called inside optimizer.no_sync"):
            clip_grad_norm_(optimizer, 1.0)
    clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    assert same_on_all_ranks(model.parameters())

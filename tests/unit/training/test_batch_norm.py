"""convert_sync_batchnorm: what is replaced, what is kept, what is left alone."""

import pytest
import torch
from torch import nn

from hvlike import ProcessSet, SyncBatchNorm, convert_sync_batchnorm
from hvlike.errors import UsageError

REPLACED = {
    "1d": lambda: nn.BatchNorm1d(3),
    "2d": lambda: nn.BatchNorm2d(3, eps=0.1, momentum=None),
    "3d": lambda: nn.BatchNorm3d(3, affine=False),
    "no running statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "float64": lambda: nn.BatchNorm2d(3, dtype=torch.float64),
    "torch's SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "evaluating": lambda: nn.BatchNorm2d(3).eval(),
    "frozen": lambda: nn.BatchNorm2d(3).requires_grad_(False),
}
LEFT_ALONE = {
    "instance": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(1, 3),
    "layer": lambda: nn.LayerNorm(3),
    "ours": lambda: SyncBatchNorm(3),
    "linear": lambda: nn.Linear(2, 3),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_replaced_with_all_it_has(kind: str) -> None:
    old = REPLACED[kind]()
    new = convert_sync_batchnorm(old)
    assert type(new) is SyncBatchNorm
    for name in ("num_features", "eps", "momentum", "affine", "track_running_stats", "training"):
        assert getattr(new, name) == getattr(old, name), name
    assert [name for name, _ in new.named_parameters()] == [name for name, _ in old.named_parameters()]
    assert all(a is b for a, b in zip(new.parameters(), old.parameters(), strict=True))
    assert all(a is b for a, b in zip(new.buffers(), old.buffers(), strict=True))
    assert list(new.state_dict()) == list(old.state_dict())


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_left_alone(kind: str) -> None:
    layer = LEFT_ALONE[kind]()
    assert convert_sync_batchnorm(layer) is layer


def test_a_whole_model_with_a_layer_in_two_places() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(nn.ReLU(), shared, nn.BatchNorm1d(4).eval()))
    before = dict(model.named_parameters())
    process_set = ProcessSet([0])
    assert SyncBatchNorm.convert_sync_batchnorm(model, process_set) is model
    assert model[1] is model[2][1]
    assert [type(module) for module in model.modules()].count(SyncBatchNorm) == 2
    assert not model[2][2].training
    assert model[1].process_set is process_set
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_a_lazy_layer_has_to_know_its_features() -> None:
    with pytest.raises(UsageError, match="LazyBatchNorm2d does not know its number of features yet"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))
    layer = nn.LazyBatchNorm1d()
    layer(torch.randn(4, 3))
    assert convert_sync_batchnorm(layer).num_features == 3

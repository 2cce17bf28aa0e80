"""What DistributedDataParallel accepts, and what it says to the rest."""

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.ddp_models import Shared, assert_same, gradients, inputs, share
from torch import nn

from hvlike.errors import DataParallelError, MismatchError, UsageError
from hvlike.nn import DistributedDataParallel


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "options", "text"),
    [
        (frozen(), {}, "doesn't have any parameter that requires a gradient"),
        (nn.LazyLinear(2), {}, r"uninitialized parameters.*'weight' has no shape yet"),
        (torch.ones(2), {}, "expects a torch.nn.Module, got Tensor"),
        (nn.Linear(2, 2), {"device_ids": [0, 1]}, r"can only be None or contain a single element. Got \[0, 1\]"),
        (nn.Linear(2, 2), {"device_ids": [0]}, r"got device_ids \[0\], output_device None, .*\['cpu'\]"),
        (nn.Linear(2, 2), {"output_device": 0}, "got device_ids None, output_device 0"),
        (nn.Linear(2, 2), {"bucket_cap_mb": 0}, "bucket_cap_mb must be a number of MiB above 0, or None; got 0"),
        (nn.Linear(2, 2), {"process_set": "all"}, "must be a ProcessSet .*, got 'all'"),
    ],
    ids=str,
)
def test_what_is_refused(hvd: ModuleType, module: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedDataParallel(module, **options)


def test_errors_that_torch_raises_as_runtime_errors_are_such(hvd: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="is not needed when a module doesn't have"):
        DistributedDataParallel(frozen())
    assert issubclass(DataParallelError, UsageError)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda rank: nn.Linear(2, 2 + rank),
            r"rank 1: 'parameter weight': expected shape \[2, 2\].*got shape \[3, 2\]",
        ),
        (lambda rank: nn.Linear(2, 2, bias=rank == 0), "rank 1: 'parameter bias' is missing"),
        (lambda rank: nn.Linear(2, 2, dtype=[torch.float32, torch.float64][rank % 2]), "float32.*got .*float64"),
        (
            lambda rank: nn.Conv2d(2, 3, 2).to(memory_format=[torch.contiguous_format, torch.channels_last][rank % 2]),
            r"strides \[8, 4, 2, 1\], got .* strides \[8, 1, 4, 2\]",
        ),
        (lambda rank: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(rank == 0)), "without gradient"),
    ],
    ids=["shape", "number", "dtype", "strides", "frozen"],
)
def test_modules_that_differ_are_refused_on_every_rank(hvd: ModuleType, make: Any, text: str) -> None:
    torch.manual_seed(hvd.rank())
    module = make(hvd.rank())
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MismatchError, match=text):
        DistributedDataParallel(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_without_a_common_start(hvd: ModuleType) -> None:
    torch.manual_seed(hvd.rank())
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    DistributedDataParallel(module, init_sync=False)
    assert torch.equal(module.weight, before)


def test_ignored_parameters_stay_local(hvd: ModuleType) -> None:
    module = Shared()
    module._ddp_params_and_buffers_to_ignore = ["second.bias"]
    ddp = DistributedDataParallel(module)
    ddp(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    alone = Shared()
    alone(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    torch.testing.assert_close(module.second.bias.grad, alone.second.bias.grad)


def test_state_dicts_are_those_of_the_module_under_its_name(hvd: ModuleType) -> None:
    module = Shared()
    ddp = DistributedDataParallel(module)
    assert list(ddp.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    assert ddp.module is module
    ddp.load_state_dict({name: torch.zeros_like(value) for name, value in ddp.state_dict().items()})
    assert not module.first.weight.any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))], ids=["copy", "pickle"])
def test_copies_reduce_by_themselves(hvd: ModuleType, copied: Any) -> None:
    ddp = DistributedDataParallel(nn.Sequential(Shared(), nn.BatchNorm1d(4)), find_unused_parameters=True)
    ddp(share(hvd, inputs())).square().mean().backward()
    other = copied(ddp)
    assert other.find_unused_parameters
    for network in (ddp, other):
        network.zero_grad()
        network.module[1].reset_running_stats()
        for step in range(2):
            network(share(hvd, inputs(step))).square().mean().backward()
    assert_same(gradients(ddp), gradients(other))


def test_a_module_may_be_wrapped_again(hvd: ModuleType) -> None:
    module, alone = Shared(), Shared()
    first = DistributedDataParallel(module)
    second = DistributedDataParallel(module)
    for network in (first, second, first):
        network(share(hvd, inputs())).square().mean().backward()
        alone(inputs()).square().mean().backward()
    assert_same(gradients(module), gradients(alone))


def test_parameters_that_come_later_are_not_reduced(hvd: ModuleType) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    ddp = DistributedDataParallel(module)
    module.append(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        module[1].weight.fill_(1.0)
    x = torch.full((1, 2), float(hvd.rank()))
    ddp(x).sum().backward()
    assert torch.equal(module[1].weight.grad, module[0](x))
    torch.testing.assert_close(module[0].weight.grad, torch.full((2, 2), (hvd.size() - 1) / 2))


def test_requires_grad_is_followed(hvd: ModuleType) -> None:
    module, alone = Shared(), Shared()
    ddp = DistributedDataParallel(module)
    for flag in (True, False, True):
        for network, batch in ((ddp, share(hvd, inputs())), (alone, inputs())):
            network.zero_grad()
            getattr(network, "module", network).first.bias.requires_grad_(flag)
            network(batch).square().mean().backward()
        assert_same(gradients(module), gradients(alone))


def test_no_collective_where_nothing_is_trained(hvd: ModuleType) -> None:
    ddp = DistributedDataParallel(Shared())
    if hvd.rank() == 0:
        with torch.no_grad():
            ddp(inputs())
        # A forward whose result is dropped.
        ddp.eval()(inputs())
    ddp(share(hvd, inputs())).sum().backward()

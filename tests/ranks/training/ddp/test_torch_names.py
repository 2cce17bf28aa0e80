"""What programs written for torch's DistributedDataParallel use beside its constructor and its calls."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.ddp_models import Shared, assert_same, gradients, inputs, share
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from hvlike import nn as ours
from hvlike.errors import DataParallelError, UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.training.ddp.comm_hooks import compression_of


def train(hvd: ModuleType, hook: Any = None, state: Any = None) -> nn.Module:
    """The gradients of four steps."""
    module = Shared()
    ddp = DistributedDataParallel(module)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for step in range(4):
        ddp(share(hvd, inputs(step))).square().mean().backward()
    return module


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_torchs_hooks_do_what_ours_do(hvd: ModuleType, name: str) -> None:
    hook = getattr(default_hooks, name)
    assert compression_of(None, hook) is compression_of(None, getattr(ours, name))
    assert_same(gradients(train(hvd, hook)), gradients(train(hvd, getattr(ours, name))))


def test_a_hook_of_torch_around_a_hook_of_the_user(hvd: ModuleType) -> None:
    def average(state: Any, bucket: Any) -> Any:
        assert bucket.buffer().dtype is torch.float16
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(hvd.allreduce(bucket.buffer(), name=f"bucket {bucket.index()}"))
        return future

    wrapped = gradients(train(hvd, default_hooks.fp16_compress_wrapper(average)))
    for one, other in zip(wrapped, gradients(train(hvd)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_wrapper_of_torch_around_the_plain_hook(hvd: ModuleType, kind: str) -> None:
    hook = getattr(default_hooks, f"{kind}_compress_wrapper")(default_hooks.allreduce_hook)
    assert compression_of(None, hook) is compression_of(None, getattr(ours, f"{kind}_compress_hook"))


@pytest.mark.parametrize(("kind", "name"), [("ALLREDUCE", "allreduce_hook"), ("FP16_COMPRESS", "fp16_compress_hook")])
def test_torchs_built_in_hooks(hvd: ModuleType, kind: str, name: str) -> None:
    module = Shared()
    ddp = DistributedDataParallel(module)
    ddp._register_builtin_comm_hook(getattr(torch.distributed.BuiltinCommHookType, kind))
    with pytest.raises(DataParallelError, match="can only be called once"):
        ddp.register_comm_hook(None, ours.allreduce_hook)
    for step in range(4):
        ddp(share(hvd, inputs(step))).square().mean().backward()
    assert_same(gradients(module), gradients(train(hvd, getattr(ours, name))))


@pytest.mark.parametrize(
    ("name", "state", "hook"),
    [
        ("quantization_pertensor_hook", None, quantization_hooks.quantization_pertensor_hook),
        ("powerSGD_hook", powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook),
        (
            "powerSGD_hook",
            powerSGD_hook.PowerSGDState(None),
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        ),
    ],
)
def test_a_hook_of_torch_that_needs_a_process_group_says_so(hvd: ModuleType, name: str, state: Any, hook: Any) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=rf"{name} of torch reduces over a process group .* none"):
        ddp.register_comm_hook(state, hook)
    # Nothing has been registered.
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def test_attributes(hvd: ModuleType) -> None:
    ddp = DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
    assert ddp.process_group is ddp.process_set is hvd.global_process_set
    assert not ddp.broadcast_buffers
    ddp.broadcast_buffers = True
    assert ddp.forward_sync_buffers
    assert not ddp.gradient_as_bucket_view


def test_a_graph_may_be_called_static_after_construction(hvd: ModuleType) -> None:
    ddp = DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    ddp.module.forward = ddp.module[0].forward
    ddp._set_static_graph()
    with pytest.warns(UserWarning, match="no need to set it again"):
        ddp._set_static_graph()
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.module[1].weight.grad is None
    late = DistributedDataParallel(nn.Linear(2, 2))
    late(torch.ones(1, 2)).sum().backward()
    with pytest.raises(DataParallelError, match="after the first forward"):
        late._set_static_graph()


def test_parameters_are_ignored_by_name(hvd: ModuleType) -> None:
    module = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    ddp = DistributedDataParallel(module)
    ddp(torch.full((1, 2), float(hvd.rank()))).sum().mul(hvd.rank()).backward()
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [hvd.rank()] * 2
    assert ddp.parameters_to_ignore == {"bias"}


def test_arguments_that_are_not_there(hvd: ModuleType) -> None:
    nothing: dict[str, Any] = {"mixed_precision": None, "device_mesh": None, "skip_all_reduce_unused_params": False}
    DistributedDataParallel(nn.Linear(2, 2), **nothing, batched_grad_copy=True)
    with pytest.raises(
        UsageError, match=r"bucket_cap_mb_list is torch's and not supported, got \[1\]. Pass bucket_cap_mb,"
    ):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb_list=[1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'find_unused'"):
        DistributedDataParallel(nn.Linear(2, 2), find_unused=True)

"""RPC with tensors of a GPU: where they arrive, what comes back, and gradients through both."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.gpu


@pytest.fixture
def rpc(hvd: ModuleType, device: torch.device) -> Iterator[ModuleType]:
    """A session in which every worker maps its first GPU to the last GPU of the next worker."""
    from hvlike import rpc

    last = torch.cuda.device_count() - 1
    options = rpc.TensorPipeRpcBackendOptions(device_maps={f"worker{(hvd.rank() + 1) % hvd.size()}": {0: last}})
    rpc.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=options)
    yield rpc
    rpc.shutdown(timeout=60)


def next_worker(hvd: ModuleType) -> str:
    return f"worker{(hvd.rank() + 1) % hvd.size()}"


def where(values: Any) -> tuple[Any, str]:
    """What came, and where it is."""
    return values, ", ".join(str(value.device) for value in values)


def square(x: Tensor) -> Tensor:
    return x * x


def fail_with(x: Tensor) -> Tensor:
    raise ValueError(f"no {x.device}")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        # Not drawn: both threads of a rank make one at the same time, and they share the generator.
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(6.0).reshape(2, 3))
            self.layer.bias.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_tensors_arrive_where_the_map_says_and_results_come_back(hvd: ModuleType, rpc: ModuleType) -> None:
    last = torch.cuda.device_count() - 1
    here = torch.device("cuda", 0)
    mine = torch.arange(6.0, device=here).reshape(2, 3).t()
    large = torch.randn(70000, device=here)
    parameter = nn.Parameter(torch.ones(3, device=here))
    sparse = torch.eye(3, device=here).to_sparse()
    values = [mine, torch.ones(2), large, parameter, torch.empty(0, device=here), sparse]
    (back, places) = rpc.rpc_sync(next_worker(hvd), where, (values,))
    assert places == f"cuda:{last}, cpu, cuda:{last}, cuda:{last}, cuda:{last}, cuda:{last}"
    assert [each.device for each in back] == [each.device for each in values]
    for sent, received in zip(values, back, strict=True):
        assert type(received) is type(sent)
        assert received.requires_grad == sent.requires_grad
        torch.testing.assert_close(received, sent, rtol=0, atol=0)
    assert back[0].stride() == mine.stride()


def test_futures_rrefs_and_errors(hvd: ModuleType, rpc: ModuleType) -> None:
    x = torch.full((5,), 3.0, device="cuda:0")
    future = rpc.rpc_async(next_worker(hvd), square, (x,))
    doubled = rpc.rpc_async(next_worker(hvd), square, (x,)).then(lambda done: done.wait() * 2)
    rref = rpc.remote(next_worker(hvd), square, (x,))
    assert future.wait().device == x.device
    assert future.wait().tolist() == [9.0] * 5
    assert doubled.wait().tolist() == [18.0] * 5
    assert rref.to_here().device == x.device
    assert rref.to_here().tolist() == [9.0] * 5
    assert rpc.RRef(x).local_value() is x
    with pytest.raises(ValueError, match="no cuda:"):
        rpc.rpc_sync(next_worker(hvd), fail_with, (x,))


@pytest.mark.mpi(min_size=3)
def test_without_a_map_tensors_are_refused(hvd: ModuleType, rpc: ModuleType) -> None:
    there = f"worker{(hvd.rank() + 2) % hvd.size()}"
    with pytest.raises(RuntimeError, match=f"Request to {there}: device mapping is not available for cuda:0"):
        rpc.rpc_sync(there, square, (torch.ones(1, device="cuda:0"),))


def test_remote_modules_on_a_gpu(hvd: ModuleType, rpc: ModuleType) -> None:
    from hvlike.rpc.remote_module import RemoteModule

    last = torch.cuda.device_count() - 1
    module = RemoteModule(f"{next_worker(hvd)}/cuda:{last}", Model)
    x = torch.ones(4, 3, device="cuda:0")
    expected = Model()(torch.ones(4, 3))
    for result in (module(x), module.forward_async(x).wait(), module(x.cpu())):
        assert result.device == x.device
        torch.testing.assert_close(result.cpu(), expected)
    assert module.remote_parameters()[0].owner_name() == next_worker(hvd)


@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_distributed_autograd_through_gpus(hvd: ModuleType, rpc: ModuleType, mode: str) -> None:
    from hvlike import autograd

    x = torch.linspace(1, 2, 5, device="cuda:0").requires_grad_()
    y = torch.full((5,), 2.0, requires_grad=True)
    with autograd.context() as context:
        there = rpc.rpc_sync(next_worker(hvd), square, (x * 3,))
        loss = (rpc.rpc_sync(next_worker(hvd), square, (there,)) * y.to("cuda:0")).sum()
        autograd.backward(context, [loss], mode=mode)
        gradients = autograd.get_gradients(context)
        assert gradients[x].device == x.device
        assert gradients[y].device == y.device
        torch.testing.assert_close(gradients[x], 2 * 81 * 4 * x.detach() ** 3)
        torch.testing.assert_close(gradients[y], 81 * x.detach().cpu() ** 4)


def test_data_parallel_modules_in_a_context(hvd: ModuleType, rpc: ModuleType, device: torch.device) -> None:
    """Autograd runs nodes of a GPU in a thread of its own, where the pass has to be known for that of the context."""
    from hvlike import autograd
    from hvlike.nn import DistributedDataParallel

    model = DistributedDataParallel(Model().to(device))
    x = torch.full((2, 3), float(hvd.rank() + 1), device=device)
    with autograd.context() as context:
        autograd.backward(context, [model(x).sum()])
        gradients = autograd.get_gradients(context)
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    assert [each.grad for each in model.parameters()] == [None, None]
    torch.testing.assert_close(gradients[model.module.layer.weight], torch.full((2, 3), 2 * mean, device=device))

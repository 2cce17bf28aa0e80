"""rpc.DistributedOptimizer moves parameters as one local optimizer with the same gradients does, wherever they live."""

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hvlike

CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.RMSprop, {"lr": 0.05}),
    (optim.Adamax, {"lr": 0.05}),
    (optim.Rprop, {"lr": 0.05}),
]


class Matrix:
    """A weight with what multiplies by it."""

    def __init__(self, seed: int = 0, requires_grad: bool = True) -> None:
        values = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed))
        self.weight = values.requires_grad_(requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight @ inputs

    def get_weight(self) -> Tensor:
        return self.weight

    def get_grad(self) -> Tensor | None:
        return self.weight.grad

    def set_grad(self, value: float) -> None:
        self.weight.grad = torch.full((3, 3), value)


def weights_of(modules: list[Any]) -> list[Tensor]:
    """Read through RPC, as the owners have them now."""
    return [module.rpc_sync().get_weight().detach() for module in modules]


def chain(forwards: list[Any], step: int) -> Tensor:
    """What the modules make of the inputs of a step, one after the other."""
    values = torch.rand(3, 3, generator=torch.Generator().manual_seed(100 + step))
    for forward in forwards:
        values = forward(values)
    return values.sum()


def local_run(optimizer_class: Any, arguments: dict[str, Any], steps: int) -> list[list[Tensor]]:
    """The weights after each step of one process."""
    modules = [Matrix(0), Matrix(1), Matrix(2, False)]
    optimizer = optimizer_class([module.weight for module in modules], **arguments)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward([chain([module.forward for module in modules], step)])
        optimizer.step()
        found.append([module.weight.detach().clone() for module in modules])
    return found


@pytest.mark.parametrize(("optimizer_class", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_equal_to_the_local_optimizer(
    rpc: ModuleType, autograd: ModuleType, optimizer_class: Any, arguments: dict[str, Any]
) -> None:
    """Two weights on other workers, and one that requires no gradient."""
    rank, size = rpc.get_worker_info().id, hvlike.size()
    owners = [(rank + 1) % size, (rank + 2) % size, (rank + 1) % size]
    modules = [rpc.remote(owner, Matrix, (place, place < 2)) for place, owner in enumerate(owners)]
    start = weights_of(modules)
    optimizer = rpc.DistributedOptimizer(
        optimizer_class, [module.remote().get_weight() for module in modules], **arguments
    )
    for step, expected in enumerate(local_run(optimizer_class, arguments, steps=2)):
        with autograd.context() as context_id:
            autograd.backward(context_id, [chain([module.rpc_sync().forward for module in modules], step)])
            optimizer.step(context_id)
            torch.testing.assert_close(weights_of(modules), expected)
    assert [torch.equal(*pair) for pair in zip(start, weights_of(modules), strict=True)] == [False, False, True]


def test_several_parameters_of_one_owner_and_those_of_this_worker(rpc: ModuleType, autograd: ModuleType) -> None:
    rank, size = rpc.get_worker_info().id, hvlike.size()
    modules = [rpc.remote((rank + place // 2) % size, Matrix, (place,)) for place in range(6)]
    own = torch.ones(3, 3, requires_grad=True)
    rrefs = [module.remote().get_weight() for module in modules]
    optimizer = rpc.DistributedOptimizer(optim.SGD, [*rrefs, rpc.RRef(own)], lr=0.5)
    assert len(optimizer.remote_optimizers) == min(size, 3)
    start = weights_of(modules)
    with autograd.context() as context_id:
        total = torch.stack([module.rpc_sync().forward(torch.eye(3)) for module in modules]).sum() + (2 * own).sum()
        autograd.backward(context_id, [total])
        optimizer.step(context_id)
        for before, after in zip(start, weights_of(modules), strict=True):
            assert torch.equal(after, before - 0.5)
    assert torch.equal(own.detach(), torch.zeros(3, 3))


def test_gradients_of_the_past_do_not_move_a_parameter(rpc: ModuleType, autograd: ModuleType) -> None:
    """What lies in .grad, momentum and weight decay would move it; `.grad` is afterwards what it was before."""
    rank, size = rpc.get_worker_info().id, hvlike.size()
    used, idle = (rpc.remote((rank + 1) % size, Matrix, (seed,)) for seed in range(2))
    rrefs = [module.remote().get_weight() for module in (used, idle)]
    optimizer = rpc.DistributedOptimizer(optim.SGD, rrefs, lr=0.1, momentum=0.9, weight_decay=0.1)
    with autograd.context() as context_id:
        outputs = idle.rpc_sync().forward(used.rpc_sync().forward(torch.eye(3)))
        autograd.backward(context_id, [outputs.sum()])
        optimizer.step(context_id)
    assert idle.rpc_sync().get_grad() is None
    idle.rpc_sync().set_grad(7.0)
    before = weights_of([used, idle])
    with autograd.context() as context_id:
        autograd.backward(context_id, [used.rpc_sync().forward(torch.eye(3)).sum()])
        optimizer.step(context_id)
    after = weights_of([used, idle])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    assert torch.equal(idle.rpc_sync().get_grad(), torch.full((3, 3), 7.0))


def test_a_step_before_any_backward_moves_nothing(rpc: ModuleType, autograd: ModuleType) -> None:
    """Also for an owner that the context has not reached, and from a thread without a context."""
    rank, size = rpc.get_worker_info().id, hvlike.size()
    module = rpc.remote((rank + 1) % size, Matrix)
    optimizer = rpc.DistributedOptimizer(optim.Adam, [module.remote().get_weight()])
    before = weights_of([module])
    with autograd.context() as context_id:
        thread = threading.Thread(target=optimizer.step, args=(context_id,))
        thread.start()
        thread.join()
        optimizer.step(context_id)
    assert torch.equal(weights_of([module])[0], before[0])


def test_parameters_of_modules_and_sparse_gradients(rpc: ModuleType, autograd: ModuleType) -> None:
    rank, size = rpc.get_worker_info().id, hvlike.size()
    table = rpc.RemoteModule(f"rank:{(rank + 1) % size}", make_table)
    optimizer = rpc.DistributedOptimizer(optim.SparseAdam, table.remote_parameters(), lr=0.1)
    alone = make_table()
    local: Any = optim.SparseAdam(alone.parameters(), lr=0.1)
    rows = torch.tensor([1, 1, 4])
    with autograd.context() as context_id:
        autograd.backward(context_id, [table(rows).square().sum()])
        optimizer.step(context_id)
    torch.autograd.backward([alone(rows).square().sum()])
    local.step()
    found = table.get_module_rref().to_here().weight
    torch.testing.assert_close(found, alone.weight)
    assert torch.equal(found[[0, 2, 3]], make_table().weight[[0, 2, 3]])


def make_table() -> torch.nn.Embedding:
    values = torch.rand(5, 2, generator=torch.Generator().manual_seed(3))
    return torch.nn.Embedding(5, 2, _weight=values, sparse=True)

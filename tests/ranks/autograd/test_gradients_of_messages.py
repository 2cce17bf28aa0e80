"""Gradients through every kind of tensor and message are those of the same function called directly."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import open_door, pass_door
from torch import Tensor, nn

import hvlike.rpc
from hvlike.rpc.functions import async_execution


def ramp(*shape: int) -> Tensor:
    """A leaf of float64 with different elements."""
    count = int(torch.Size(shape).numel())
    return torch.arange(1.0, count + 1, dtype=torch.float64).view(shape).requires_grad_()


def conjugate() -> tuple[Any, list[Tensor]]:
    leaf = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
    return (leaf.conj(), leaf), [leaf]


def negative() -> tuple[Any, list[Tensor]]:
    leaf = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
    return (leaf.conj().imag, leaf.real), [leaf]


def sparse() -> tuple[Any, list[Tensor]]:
    leaf = torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64)).to_sparse().requires_grad_()
    dense = ramp(3, 2)
    return (leaf, dense), [leaf, dense]


def containers() -> tuple[Any, list[Tensor]]:
    leaves = [ramp(3) for _ in range(4)]
    return ({"a": [leaves[0], (leaves[1],)], leaves[2]: leaves[3]}, leaves[0]), leaves


def parameters() -> tuple[Any, list[Tensor]]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    inputs = ramp(5, 3)
    return (module, inputs, extra), [inputs, extra, *module.parameters()]


def multiply_conjugates(first: Tensor, second: Tensor) -> Tensor:
    return (first * second * (1 + 3j)).abs().sum()


def multiply_parts(imaginary: Tensor, real: Tensor) -> Tensor:
    return (imaginary * real * 2).sum()


def multiply_sparse(matrix: Tensor, dense: Tensor) -> Any:
    return (torch.sparse.mm(matrix, dense) ** 2).sum()


def combine_containers(value: Any, again: Tensor) -> Any:
    ((key, other),) = [(key, value[key]) for key in value if isinstance(key, Tensor)]
    first, (second,) = value["a"]
    assert first is again
    return (first * second * key * other * again).sum()


def apply_module(module: nn.Module, inputs: Tensor, extra: Tensor) -> Any:
    return (module(inputs) * extra).pow(2).sum()


def double_in_place(value: Tensor) -> Tensor:
    value.mul_(value.detach() + 1)
    value[0].add_(1)
    return (value**2).sum()


def in_place() -> tuple[Any, list[Tensor]]:
    leaf = ramp(3, 2)
    return (leaf * 1,), [leaf]


@async_execution
def later(to: int, function: Callable[..., Tensor], args: Any) -> Any:
    """The function's result on another worker, squared in a callback."""
    return hvlike.rpc.rpc_async(to, function, args).then(lambda future: future.wait() ** 2)


def twice(function: Callable[..., Tensor], args: Any, to: int) -> Tensor:
    """By way of one more worker."""
    result: Tensor = hvlike.rpc.rpc_sync(to, function, args)
    return result


KINDS: dict[str, tuple[Callable[[], tuple[Any, list[Tensor]]], Callable[..., Tensor]]] = {
    "conjugates": (conjugate, multiply_conjugates),
    "negatives": (negative, multiply_parts),
    "sparse": (sparse, multiply_sparse),
    "containers": (containers, combine_containers),
    "parameters": (parameters, apply_module),
    "in place": (in_place, double_in_place),
}


def check(found: dict[Tensor, Tensor], leaves: list[Tensor], expected: list[Tensor]) -> None:
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert found[leaf].layout is gradient.layout
        assert torch.allclose(found[leaf].to_dense(), gradient.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", list(KINDS))
def test_arguments_of_every_kind_and_by_every_form_of_call(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, kind: str
) -> None:
    make, function = KINDS[kind]
    beyond = (peer + 1) % hvd.size()
    forms: list[Callable[[Any], Tensor]] = [
        lambda args: rpc.rpc_sync(peer, function, args),
        lambda args: rpc.rpc_async(peer, function, args).wait(),
        lambda args: rpc.remote(peer, function, args).to_here(),
        lambda args: rpc.rpc_sync(peer, twice, (function, args, beyond)),
    ]
    args, leaves = make()
    expected = torch.autograd.grad(function(*args), leaves)
    for mode in ("safe", "fast", "smart"):
        for form in forms:
            args, leaves = make()
            with autograd.context() as context:
                autograd.backward(context, [form(args)], mode=mode)
                check(autograd.get_gradients(context), leaves, list(expected))


@pytest.mark.parametrize("kind", ["containers", "parameters"])
def test_through_callbacks_of_async_functions(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, kind: str
) -> None:
    make, function = KINDS[kind]
    args, leaves = make()
    expected = torch.autograd.grad(function(*args) ** 2 * 3, leaves)
    args, leaves = make()
    with autograd.context() as context:
        future = rpc.rpc_async(peer, later, ((peer + 1) % hvd.size(), function, args)).then(
            lambda done: done.wait() * 3
        )
        autograd.backward(context, [future.wait()])
        check(autograd.get_gradients(context), leaves, list(expected))


def test_a_forward_in_place_here_after_sending(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    leaf = ramp(3)
    with autograd.context() as context:
        tensor = leaf * 1
        there = rpc.rpc_sync(peer, torch.mul, (tensor, 2))
        tensor.mul_(10)
        autograd.backward(context, [(there + tensor).sum()])
        check(autograd.get_gradients(context), [leaf], [torch.full((3,), 12.0, dtype=torch.float64)])


@pytest.mark.parametrize("mode", ["safe", "smart"])
def test_nobody_waits_for_an_answer_that_came_too_late(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, mode: str
) -> None:
    door = f"gradients too late {mode} {hvd.rank()}"
    leaf = ramp(3)
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync(peer, pass_door, (door, leaf), timeout=0.05)
        result = rpc.rpc_sync(peer, torch.mul, (leaf, 2)).sum()
        rpc.rpc_sync(peer, open_door, (door,))
        # The answer may be on its way, or sent later than this, or taken back already.
        autograd.backward(context, [result], mode=mode)
        check(autograd.get_gradients(context), [leaf], [torch.full((3,), 2.0, dtype=torch.float64)])

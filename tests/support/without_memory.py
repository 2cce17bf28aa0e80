"""Tensors that have no memory of their own: each kind hands one to a call that must refuse it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

Use = Callable[[Tensor], Any]


class Wrapper(torch.Tensor):
    """Stands for another tensor, as DTensor does, and computes with that."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Wrapper, lambda each: each.inner, args)
        found = function(*plain, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapper, found)


class Named(torch.Tensor):
    """A subclass that has the memory of a plain tensor."""


def freed(use: Use) -> None:
    tensor = torch.ones(4, 2)
    tensor.untyped_storage().resize_(0)
    use(tensor)


def functional_tensor(use: Use) -> None:
    with FunctionalTensorMode():
        tensor = FunctionalTensor.to_functional(torch.ones(4, 2))
    use(tensor)


def in_fake_mode(use: Use) -> None:
    with FakeTensorMode():
        use(torch.ones(4, 2))


KINDS: dict[str, tuple[Callable[[Use], Any], str]] = {
    "wrapper": (lambda use: use(Wrapper(torch.ones(4, 2))), "a Wrapper, which wraps other tensors"),
    "meta": (lambda use: use(torch.ones(4, 2, device="meta")), "a meta tensor"),
    "fake": (lambda use: use(FakeTensorMode().from_tensor(torch.ones(4, 2))), "a FakeTensor"),
    "in fake mode": (in_fake_mode, "a FakeTensor"),
    "functional": (functional_tensor, "a FunctionalTensor"),
    "nested": (
        lambda use: use(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        "a NestedTensor",
    ),
    "strided nested": (lambda use: use(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "a nested tensor"),
    "vmap": (lambda use: torch.func.vmap(use)(torch.ones(3, 4, 2)), "one of torch.func"),
    "grad": (lambda use: torch.func.grad(use)(torch.ones(4, 2)), "one of torch.func"),
    "jvp": (lambda use: torch.func.jvp(use, (torch.ones(4, 2),), (torch.ones(4, 2),)), "one of torch.func"),
    "functionalize": (lambda use: torch.func.functionalize(use)(torch.ones(4, 2)), "one of torch.func"),
}

IN_PLACE = {
    "freed": (freed, "one whose memory was freed"),
    "zeros": (lambda use: use(torch._efficientzerotensor((4, 2))), "zeros without memory"),
}
"""Those that a copy makes good, so that only what reads or writes them in place refuses them."""

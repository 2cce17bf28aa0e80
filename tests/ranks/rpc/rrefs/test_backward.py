"""RRef.backward as far as ordinary autograd goes."""

from types import ModuleType

import pytest
import torch


def test_without_a_context_it_is_ordinary_autograd(rpc: ModuleType) -> None:
    leaf = torch.ones(3, requires_grad=True)
    rref = rpc.RRef((leaf * 2).sum())
    rref.backward(retain_graph=True)
    rref.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((3,), 4.0))
    square = rpc.RRef((leaf**2).sum())
    square.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        square.backward()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "RRef should contain a tensor for .backward()"),
        (torch.ones(3), "does not require grad and does not have a grad_fn"),
        (torch.ones(3, requires_grad=True), "grad can be implicitly created only for scalar outputs"),
    ],
)
def test_what_the_owner_cannot_do(rpc: ModuleType, value: object, said: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        rpc.RRef(value).backward()
    assert said in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_users_need_a_context(rpc: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, torch.ones, (1,))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        rref.backward()


def test_an_unknown_context(rpc: ModuleType, peer: int) -> None:
    for rref in (rpc.RRef(torch.ones(1)), rpc.remote(peer, torch.ones, (1,))):
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
            rref.backward(100)

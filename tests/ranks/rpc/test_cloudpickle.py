"""Lambdas and local functions as callables, arguments and results, in a session with the option cloudpickle."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import hvlike.rpc

pytest.importorskip("cloudpickle")


def run(func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def adder(number: int) -> Callable[[int], int]:
    """A result that has no name."""
    return lambda other: number + other


@pytest.fixture
def rpc(hvd: ModuleType) -> Iterator[ModuleType]:
    """A session of RPC with the option."""
    options = hvlike.rpc.RpcBackendOptions(cloudpickle=True)
    hvlike.rpc.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=options)
    yield hvlike.rpc
    hvlike.rpc.shutdown(timeout=60)


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


def test_functions_without_a_name_travel(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    weight: torch.Tensor = torch.arange(3.0) + hvd.rank()

    def local(factor: int) -> torch.Tensor:
        return weight.mul(factor)

    assert torch.equal(rpc.rpc_sync(peer, local, (2,)), weight * 2)
    assert rpc.rpc_async(peer, lambda: 7).wait() == 7
    assert rpc.remote(peer, lambda x: x + 1, (7,)).to_here() == 8
    assert rpc.rpc_sync(peer, run, (lambda x: x + 1, 7)) == 8


def test_results_without_a_name_travel(rpc: ModuleType, peer: int) -> None:
    assert rpc.rpc_sync(peer, adder, (3,))(4) == 7
    assert rpc.remote(peer, adder, (3,)).to_here()(4) == 7


def test_instances_of_local_classes_travel(rpc: ModuleType, peer: int) -> None:
    class Local:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def double(self) -> torch.Tensor:
            return self.value.mul(2)

    local = Local(torch.ones(2))
    assert rpc.rpc_sync(peer, local.double).tolist() == [2, 2]
    assert type(rpc.rpc_sync(peer, run, (Local, torch.ones(2)))).__name__ == "Local"


def test_what_has_a_name_still_travels_by_it(rpc: ModuleType, peer: int) -> None:
    assert rpc.rpc_sync(peer, run, (torch.add, torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.rpc_sync(peer, run, (type, run)) is type(run)

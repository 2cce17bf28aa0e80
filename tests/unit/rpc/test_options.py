"""The options of init_rpc: torch's constructors, what they refuse, and how arguments and options settle."""

import pickle
from typing import Any

import pytest
import torch

from hvlike.errors import UsageError
from hvlike.rpc.agent.options import (
    BackendType,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    checked_timeout,
    settle_options,
)
from hvlike.rpc.constants import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT
from hvlike.rpc.wire.message import WorkerInfo


def test_defaults_are_torchs() -> None:
    for options in (RpcBackendOptions(), TensorPipeRpcBackendOptions(), settle_options(None, None, None, None)):
        assert options.num_worker_threads == DEFAULT_NUM_WORKER_THREADS == 16
        assert options.rpc_timeout == DEFAULT_RPC_TIMEOUT_SEC == 60.0
        assert options.init_method == "env://"
        assert not options.cloudpickle
    assert UNSET_RPC_TIMEOUT < 0


def test_arguments_of_torch_programs() -> None:
    options = TensorPipeRpcBackendOptions(
        num_worker_threads=8,
        rpc_timeout=20,
        init_method="tcp://localhost:29500",
        device_maps={"worker1": {}},
        devices=[],
        _transports=["uv"],
        _channels=["basic"],
    )
    options.set_device_map("worker2", {})
    options.set_devices([])
    options.rpc_timeout = 30
    settled = settle_options(BackendType.TENSORPIPE, options, None, None)
    assert (settled.num_worker_threads, settled.rpc_timeout) == (8, 30.0)


def test_arguments_of_init_rpc_come_before_the_options() -> None:
    given = RpcBackendOptions(num_worker_threads=8, rpc_timeout=20, cloudpickle=True)
    settled = settle_options(None, given, 4, 0)
    assert (settled.num_worker_threads, settled.rpc_timeout, settled.cloudpickle) == (4, 0.0, True)
    assert (given.num_worker_threads, given.rpc_timeout) == (8, 20.0)


def test_backends() -> None:
    torchs: Any = torch.distributed.rpc.BackendType
    for backend in (None, BackendType.MPI, BackendType.TENSORPIPE, torchs.TENSORPIPE):
        assert settle_options(backend, None, None, None).rpc_timeout == 60.0
    assert repr(BackendType.TENSORPIPE) == "BackendType.TENSORPIPE"
    with pytest.raises(UsageError, match="backend must be"):
        settle_options("gloo", None, None, None)


@pytest.mark.parametrize("threads", [0, -1, 1.5, "16", True, None])
def test_numbers_of_threads_that_cannot_be(threads: Any) -> None:
    with pytest.raises(UsageError, match="num_worker_threads must be an int of at least 1"):
        RpcBackendOptions(num_worker_threads=threads)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "60", None, True])
def test_time_limits_that_cannot_be(seconds: Any) -> None:
    with pytest.raises(UsageError, match=r"rpc_timeout must be a number of seconds, 0 for no limit"):
        RpcBackendOptions(rpc_timeout=seconds)


@pytest.mark.parametrize(("seconds", "taken"), [(0, 0.0), (0.001, 0.001), (60, 60.0), (float("inf"), float("inf"))])
def test_time_limits_that_can_be(seconds: float, taken: float) -> None:
    assert checked_timeout("timeout", seconds) == taken


def test_what_is_set_later_is_looked_at_when_rpc_starts() -> None:
    options = RpcBackendOptions()
    options.rpc_timeout = -5
    with pytest.raises(UsageError, match="rpc_timeout"):
        settle_options(None, options, None, None)


def test_options_of_others_are_refused() -> None:
    for options in ({"rpc_timeout": 5}, torch.distributed.rpc.TensorPipeRpcBackendOptions()):
        with pytest.raises(UsageError, match=r"rpc_backend_options must be hvlike\.rpc\.RpcBackendOptions"):
            settle_options(None, options, None, None)
    with pytest.raises(UsageError, match="cloudpickle must be True or False"):
        RpcBackendOptions(cloudpickle="yes")  # type: ignore[arg-type]


def test_worker_infos_are_values() -> None:
    info = WorkerInfo("worker1", 1)
    assert str(info) == repr(info) == "WorkerInfo(id=1, name=worker1)"
    assert info == WorkerInfo(id=1, name="worker1")
    assert {info: "found"}[pickle.loads(pickle.dumps(info))] == "found"
    for other in (WorkerInfo("worker1", 2), WorkerInfo("worker2", 1), "worker1", 1, ("worker1", 1), None):
        assert info != other
    with pytest.raises(AttributeError):
        info.name = "other"  # type: ignore[misc]

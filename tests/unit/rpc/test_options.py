"""The options of init_rpc: torch's constructors, device maps, what they refuse, how all of it settles."""

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
from hvlike.rpc.wire.devices import NO_EVENTS, DeviceMaps, DeviceOffer, check_offers, parse_map


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


NO_THREADS = "num_worker_threads must be an int of at least 1"
NO_SECONDS = "rpc_timeout must be a number of seconds, 0 for no limit"


@pytest.mark.parametrize(
    ("option", "text", "values"),
    [
        ("num_worker_threads", NO_THREADS, [0, -1, 1.5, "16", True, None]),
        ("rpc_timeout", NO_SECONDS, [-1, float("nan"), "60", None, True]),
        ("cloudpickle", "cloudpickle must be True or False", ["yes"]),
    ],
    ids=["threads", "time limit", "cloudpickle"],
)
def test_options_that_cannot_be(option: str, text: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=text):
            RpcBackendOptions(**{option: value})


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


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


def test_forms_of_devices() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"worker1": {0: 1, "cuda:1": torch.device("cuda:0")}})
    assert options.device_maps == {"worker1": {gpu(0): gpu(1), gpu(1): gpu(0)}}
    options.set_device_map("worker1", {2: 3})
    options.set_device_map("worker2", {})
    options.set_devices([0, "cuda:2"])
    settled = settle_options(None, options, None, None)
    assert settled.device_maps["worker1"] == {gpu(0): gpu(1), gpu(1): gpu(0), gpu(2): gpu(3)}
    assert settled.devices == [gpu(0), gpu(2)]
    options.set_device_map("worker1", {4: 5})
    assert gpu(4) not in settled.device_maps["worker1"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cpu": 0}, "'cpu' is no GPU with a number"),
        ({0: "cpu"}, "'cpu' is no GPU with a number"),
        ({"cuda": 0}, "'cuda' is no GPU with a number"),
        ({"gpu0": 0}, "'gpu0' is no device"),
        ({True: 0}, "True is no device"),
        ({0: None}, "None is no device"),
        ({0: 1, 1: 1}, r"only supports 1-to-1 mapping, trying to map cuda:1 to cuda:1 beside \{cuda:0: cuda:1\}"),
        ([0, 1], "expected a dict from devices here to devices there, got list"),
    ],
)
def test_maps_that_cannot_be(given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TensorPipeRpcBackendOptions(device_maps={"worker1": given})


def test_what_is_added_to_a_map_must_fit() -> None:
    before = parse_map("map", {0: 1}, {})
    assert parse_map("map", {0: 1, 1: 0}, before) == {gpu(0): gpu(1), gpu(1): gpu(0)}
    for given in ({0: 2}, {3: 1}):
        with pytest.raises(UsageError, match="1-to-1"):
            parse_map("map", given, before)


NO_DEVICES = DeviceOffer(0, {})
NAMES = ["a", "b", "c"]


def test_maps_of_all_workers_are_compared_with_what_they_have() -> None:
    offers = [
        DeviceOffer(2, {"b": {gpu(0): gpu(0), gpu(1): gpu(3)}}),
        DeviceOffer(1, {"a": {gpu(1): gpu(0)}}),
        NO_DEVICES,
    ]
    text = check_offers(NAMES, offers)
    assert text == "a maps to cuda:3, which b has not (it has 1); b maps from cuda:1, which b has not (it has 1)"
    assert "which is no worker (workers: a, b, c)" in check_offers(NAMES, [DeviceOffer(1, {"d": {}}), *offers[:2]])
    assert "it has none" in check_offers(NAMES, [DeviceOffer(1, {"c": {gpu(0): gpu(0)}}), NO_DEVICES, NO_DEVICES])
    assert not check_offers(NAMES, [DeviceOffer(2, {"b": {gpu(1): gpu(0)}}), DeviceOffer(1, {}), NO_DEVICES])


def test_results_go_back_the_way_the_arguments_came() -> None:
    offers = [DeviceOffer(2, {"b": {gpu(0): gpu(1)}}), DeviceOffer(2, {}), DeviceOffer(2, {"a": {gpu(0): gpu(0)}})]
    first, second, third = (DeviceMaps(rank, NAMES, offers, ()) for rank in range(3))
    assert first.requests[1] == {gpu(0): gpu(1)}
    assert second.replies[0] == {gpu(1): gpu(0)}
    assert 0 not in second.requests
    assert 1 not in first.replies
    assert first.replies[2] == {gpu(0): gpu(0)} == third.requests[0]
    assert (first.used, second.used, third.used) == ((gpu(0),), (gpu(1),), (gpu(0),))


def test_what_a_worker_tells_itself_stays_where_it_is() -> None:
    alone = DeviceMaps(0, ["a"], [DeviceOffer(2, {})], ())
    assert alone.requests[0] == {gpu(0): gpu(0), gpu(1): gpu(1)} == alone.replies[0]
    assert alone.used == ()
    assert alone.ready_events() is NO_EVENTS
    swapped = DeviceMaps(0, ["a"], [DeviceOffer(2, {"a": {gpu(0): gpu(1)}})], ())
    assert swapped.requests[0] == {gpu(0): gpu(1)}
    assert swapped.replies[0] == {gpu(1): gpu(0)}

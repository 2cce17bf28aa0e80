"""Device maps: torch's forms of them, what is refused, the way back, and what all workers say of each other's maps."""

from typing import Any

import pytest
import torch

from hvlike.errors import UsageError
from hvlike.rpc.agent.options import TensorPipeRpcBackendOptions, settle_options
from hvlike.rpc.wire.devices import NO_EVENTS, DeviceMaps, DeviceOffer, check_offers, parse_map


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

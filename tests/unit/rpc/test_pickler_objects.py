"""Objects on their way: containers, Parameters, modules, arrays, objects that carry their own way of travelling."""

import collections
import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.rpc.parcels import memory_bytes, received, same_memory, travel
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hvlike.rpc.wire.pickler import Incoming, Outgoing, carry_ahead, pack, unpack


class Pair(NamedTuple):
    number: int
    tensor: torch.Tensor


class Colour(enum.Enum):
    RED = 1


@dataclass
class Record:
    tensor: torch.Tensor
    notes: dict[str, Any] = field(default_factory=dict)


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Tied(torch.nn.Module):
    """Two names for one parameter, a buffer that is a view of another, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.steps: torch.Tensor
        self.last: torch.Tensor
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("last", self.steps[3:], persistent=False)
        self.register_forward_hook(double_output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def double_output(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_containers_of_every_kind() -> None:
    tensor = torch.arange(3.0)
    sent = {
        "tuple": (1, "a", None, 2.5, 1 + 2j, b"bytes", bytearray(b"array")),
        "named": Pair(1, tensor),
        "set": {1, 2},
        "frozen": frozenset("ab"),
        "ordered": collections.OrderedDict(b=1, a=tensor),
        "default": collections.defaultdict(list, x=[tensor]),
        "queue": collections.deque([tensor], maxlen=3),
        "enum": Colour.RED,
        "record": Record(tensor, {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}),
        "slots": Slotted(tensor),
        "range": range(3),
    }
    arrived = travel(sent)
    assert list(arrived) == list(sent)
    assert {key: type(value) for key, value in arrived.items()} == {key: type(value) for key, value in sent.items()}
    for key in ("tuple", "set", "frozen", "enum", "range"):
        assert arrived[key] == sent[key]
    assert torch.equal(arrived["named"].tensor, tensor)
    others = [arrived["ordered"]["a"], arrived["default"]["x"][0], arrived["queue"][0], arrived["slots"].tensor]
    assert all(other is arrived["named"].tensor for other in others)
    assert arrived["record"].notes == {"shape": torch.Size([3]), "dtype": torch.float32, "device": torch.device("cpu")}


def test_objects_that_refer_to_themselves() -> None:
    sent: list[Any] = [torch.ones(1)]
    sent.append(sent)
    arrived = travel(sent)
    assert arrived[1] is arrived


def test_a_value_without_tensors_has_no_storages() -> None:
    packed = pack((len, ([1, 2],), {}), Outgoing(1))
    assert packed.storages == []
    assert unpack(packed, Incoming(0)) == (len, ([1, 2],), {})


def test_large_values_in_the_stream() -> None:
    sent = [bytes(200_000), bytearray(b"ab" * 100_000), list(range(50_000)), torch.ones(3), "ü" * 100_000]
    arrived = travel(sent)
    assert arrived[:3] == sent[:3]
    assert arrived[3].tolist() == [1, 1, 1]
    assert arrived[4] == sent[4]


@pytest.mark.parametrize("graded", [True, False])
def test_parameters_stay_parameters(graded: bool) -> None:
    sent = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t(), requires_grad=graded)
    first, second = travel([sent, sent])
    assert first is second
    assert type(first) is torch.nn.Parameter
    assert first.requires_grad == graded
    assert first.stride() == sent.stride()
    assert torch.equal(first, sent)


def test_attributes_of_parameters_travel() -> None:
    sent = torch.nn.Parameter(torch.ones(2))
    sent.label = {"self": sent, "name": "weight"}  # type: ignore[attr-defined]
    arrived = travel(sent)
    assert arrived.label["name"] == "weight"
    assert arrived.label["self"] is arrived


def test_modules_with_shared_parameters_buffers_and_hooks() -> None:
    sent = Tied()
    outgoing = Outgoing(1)
    arrived = travel(sent, outgoing)
    assert arrived.first.weight is arrived.second.weight
    assert same_memory(arrived.steps, arrived.last)
    assert list(arrived.state_dict()) == list(sent.state_dict())
    assert len(outgoing.graded) == 2
    x = torch.ones(1, 3)
    assert torch.equal(arrived(x), sent(x))
    arrived(x).sum().backward()
    assert arrived.first.weight.grad is not None
    assert sent.first.weight.grad is None


def test_packed_sequences() -> None:
    sent = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    arrived = travel(sent)
    assert type(arrived) is PackedSequence
    assert torch.equal(arrived.data, sent.data)
    assert torch.equal(arrived.batch_sizes, sent.batch_sizes)


def test_optimizers_keep_their_parameters() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    moved, stepper = travel((layer, optimizer))
    assert stepper.param_groups[0]["params"][0] is moved.weight


def test_arrays_go_out_of_band() -> None:
    large, small = np.arange(10_000.0).reshape(100, 100), np.arange(3)
    tensor = torch.ones(4)
    packed = pack([large, tensor, small, large.T], Outgoing(1))
    assert sorted(memory_bytes(packed)) == [16, 80_000, 80_000]
    assert len(packed.body) < 3000
    assert packed.storages[0].data_ptr() == large.ctypes.data
    first, second, third, fourth = unpack(received(packed), Incoming(0))
    assert np.array_equal(first, large)
    assert torch.equal(second, tensor)
    assert np.array_equal(third, small)
    assert np.array_equal(fourth, large.T)
    first[0, 0] = 7
    assert large[0, 0] == 0


def test_arrays_that_cannot_be_sent_from_where_they_are_travel_in_the_stream() -> None:
    fixed = np.arange(10_000.0)
    fixed.flags.writeable = False
    structured = np.zeros(2000, dtype=[("a", "i4"), ("b", "f8")])
    objects = np.array([None, "text", torch.ones(1)], dtype=object)
    first, second, third, fourth = travel([fixed, np.arange(30_000)[::3], structured, objects])
    assert np.array_equal(first, fixed)
    assert not first.flags.writeable
    assert np.array_equal(second, np.arange(30_000)[::3])
    assert second.flags.writeable
    assert third.dtype == structured.dtype
    assert fourth[2].item() == 1


def test_a_registered_class_travels_as_numbers() -> None:
    class_ = Ticket
    carry_ahead(class_, lambda ticket, outgoing: (ticket.number, outgoing.destination), restore_ticket)
    ticket, tensor = Ticket(3), torch.arange(3)
    incoming = Incoming(4)
    before, first, (second,), after = travel((torch.zeros(1), ticket, [ticket], tensor), Outgoing(7), incoming)
    assert first is second
    assert first.number == 3
    assert first.path == (7, 4)
    assert (before.item(), after.tolist()) == (0, [0, 1, 2])
    assert incoming.rrefs == [first]


class Ticket:
    """Knows where it came from and where it went."""

    def __init__(self, number: int, path: tuple[int, int] | None = None) -> None:
        self.number = number
        self.path = path


def restore_ticket(numbers: tuple[int, ...], incoming: Incoming) -> Ticket:
    ticket = Ticket(numbers[0], (numbers[1], incoming.source))
    incoming.rrefs.append(ticket)
    return ticket


class Nested:
    """Packs and opens another message while it is packed itself, as an object that calls a worker would."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return open_parcel, tuple(received(pack(self.tensor, Outgoing(2)))[:2])


def open_parcel(body: bytes, storages: list[torch.Tensor]) -> Any:
    return unpack(received(pack([storages, body], Outgoing(3))), Incoming(1))


def test_messages_within_messages() -> None:
    storages, body = travel([torch.ones(2), Nested(torch.arange(2.0)), torch.zeros(1)])[1]
    assert storages == []
    assert body.endswith(b"B")

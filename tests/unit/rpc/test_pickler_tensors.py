"""Tensors on their way: values, dtypes, shapes, strides, shared memory, and what of the memory is sent."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from support.rpc.parcels import memory_bytes, received, same_memory, travel

from hvlike.errors import UsageError
from hvlike.rpc.wire import tensors
from hvlike.rpc.wire.pickler import Incoming, MessagePickler, Outgoing, Pickler, pack, reduce_tensor, unpack
from hvlike.rpc.wire.tensors import NAMES

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.fixture(autouse=True, scope="module", params=[tensors.SHORT_RECORD_BYTES, 0], ids=["short", "long"])
def limit(request: pytest.FixtureRequest) -> Iterator[int]:
    """Everything once as short memory, which goes in the body, and once as long memory, which goes by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SHORT_RECORD_BYTES", request.param)
        patch.setattr(tensors, "SHORT_BYTES", min(request.param, tensors.SHORT_BYTES))
        yield request.param


# Others: test_any_views_of_one_storage.
LAYOUTS: dict[str, torch.Tensor] = {
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "complex halves": torch.view_as_complex(torch.arange(8, dtype=torch.float16).view(4, 2)),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative imaginary part": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "negative": torch._neg_view(torch.arange(3.0)),
    "negative conjugate": torch._neg_view(torch.tensor([1 + 2j, 3 - 1j]).conj()),
}


def assert_same(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(arrived) is type(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.stride() == sent.stride()
    assert arrived.is_conj() == sent.is_conj()
    assert arrived.is_neg() == sent.is_neg()
    assert arrived.requires_grad == sent.requires_grad
    first, second = (tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (arrived, sent))
    as_bytes = [copy.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for copy in (first, second)]
    assert torch.equal(*as_bytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_by_bit(dtype: torch.dtype) -> None:
    sent = torch.arange(48, dtype=torch.uint8).view(dtype) if dtype != torch.bool else torch.tensor([True, False])
    assert_same(travel(sent), sent)
    assert_same(travel(sent[1:]), sent[1:])


def test_names_of_dtypes_are_torchs() -> None:
    assert all(getattr(torch, name) is dtype for dtype, name in NAMES.items())
    assert set(DTYPES) <= set(NAMES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shape_strides_and_kind_of_view_arrive(layout: str) -> None:
    sent = LAYOUTS[layout]
    assert_same(travel(sent), sent)
    if sent.dim() == 1:
        assert_same(travel(sent[::2]), sent[::2])


@pytest.mark.parametrize(
    "numbers", [torch.arange(3.0), torch.arange(6.0).view(2, 3).t(), torch.ones(2).to(torch.cfloat)]
)
def test_requires_grad_arrives_on_a_leaf(numbers: torch.Tensor) -> None:
    leaf = numbers.clone().requires_grad_()
    for sent in (leaf, leaf * 2):
        arrived = travel(sent)
        assert arrived.requires_grad
        assert arrived.is_leaf
        assert torch.equal(arrived, sent)
    assert not travel(numbers).requires_grad


def test_graded_tensors_are_listed_on_both_sides_once_and_in_order() -> None:
    first, second, third = (torch.full((2,), float(n), requires_grad=n != 1) for n in range(3))
    product = first * 2
    outgoing, incoming = Outgoing(1), Incoming(0)
    arrived = travel({"a": [product, second], "b": (third, product)}, outgoing, incoming)
    assert [id(tensor) for tensor in outgoing.graded] == [id(product), id(third)]
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in (arrived["a"][0], arrived["b"][0]))


def test_one_tensor_twice_arrives_as_one_object() -> None:
    sent = torch.ones(3)
    first, (second,), third = travel((sent, [sent], sent.view(3)))
    assert first is second
    assert third is not first


def test_tensors_are_keys_of_dicts() -> None:
    key = torch.ones(2)
    arrived = travel({"map": {key: "value"}, "key": key})
    assert arrived["map"][arrived["key"]] == "value"


@hypothesis.given(
    views=strategies.lists(
        strategies.tuples(
            strategies.sampled_from([torch.uint8, torch.int16, torch.float64]),
            strategies.integers(0, 20),
            strategies.lists(strategies.tuples(strategies.integers(0, 3), strategies.integers(0, 5)), max_size=3),
        ),
        max_size=6,
    )
)
@hypothesis.settings(max_examples=60)
def test_any_views_of_one_storage(views: list[tuple[torch.dtype, int, list[tuple[int, int]]]]) -> None:
    base = torch.arange(400, dtype=torch.int16).view(torch.uint8)
    sent = [
        base.view(dtype).as_strided([size for size, _ in axes], [stride for _, stride in axes], start)
        for dtype, start, axes in views
    ]
    arrived = travel(sent)
    for one, other in zip(arrived, sent, strict=True):
        assert_same(one, other)
    first = min((tensor.data_ptr() for tensor in sent if tensor.numel()), default=0)
    begin = min((tensor.data_ptr() for tensor in arrived if tensor.numel()), default=0)
    for one, other in zip(arrived, sent, strict=True):
        assert not one.numel() or one.data_ptr() - begin == other.data_ptr() - first


def test_only_the_used_span_of_a_storage_is_sent() -> None:
    base = torch.arange(1000.0)
    assert memory_bytes(pack(base[100:110], Outgoing(1))) == [40]
    assert memory_bytes(pack([base[200:300], base[100:110], base[100:110]], Outgoing(1))) == [800]
    assert memory_bytes(pack(base.view(100, 10)[:, 3], Outgoing(1))) == [4 * (990 + 1)]


def test_a_column_of_a_large_matrix_is_sent_without_the_rest() -> None:
    base = torch.arange(200_000.0).view(2000, 100).requires_grad_()
    packed = pack([base[:, 7], base[:, 8]], Outgoing(1))
    assert memory_bytes(packed) == [8000, 8000]
    first, second = unpack(received(packed), Incoming(0))
    assert first.stride() == (1,)
    assert first.requires_grad
    assert torch.equal(first, base[:, 7])
    assert torch.equal(second, base[:, 8])
    conjugate = torch.view_as_complex(base.detach().view(-1, 50, 2)).conj()[:, 3]
    assert torch.equal(travel(conjugate), conjugate)
    assert travel(conjugate).is_conj()


def test_distant_rows_of_a_large_matrix_are_sent_without_the_rest() -> None:
    base = torch.arange(200_000.0).view(2000, 100)
    packed = pack([base[-1], base[1]], Outgoing(1))
    assert memory_bytes(packed) == [400, 400]
    last, second = unpack(received(packed), Incoming(0))
    assert torch.equal(last, base[-1])
    assert torch.equal(second, base[1])


def test_a_column_beside_its_matrix_shares_its_memory() -> None:
    base = torch.arange(200_000.0).view(2000, 100)
    column, whole = travel([base[:, 7], base])
    assert same_memory(column, whole)
    assert column.stride() == (100,)


def test_memory_is_short_up_to_a_limit(limit: int) -> None:
    assert len(pack(torch.ones(limit // 4), Outgoing(1)).storages) == 0
    assert len(pack(torch.ones(limit // 4 + 1), Outgoing(1)).storages) == 1
    short, long, empty = travel([torch.ones(limit // 4), torch.ones(limit // 4 + 1), torch.ones(0)])
    assert (short.sum(), long.sum(), empty.sum()) == (limit // 4, limit // 4 + 1, 0)


def test_short_memory_is_as_it_was_when_it_was_packed() -> None:
    sent = torch.zeros(tensors.SHORT_BYTES // 4)
    packed = pack(sent, Outgoing(1))
    sent.fill_(1)
    assert unpack(packed, Incoming(0)).sum() == 0


def test_the_sender_does_not_copy_long_memory() -> None:
    sent = torch.zeros(10_000)
    packed = pack(sent.view(10, 1000).t(), Outgoing(1))
    assert packed.storages[0].data_ptr() == sent.data_ptr()
    assert (packed.storages[0].dtype, packed.storages[0].dim()) == (torch.uint8, 1)
    assert len(packed.body) < 500


def test_the_receiver_does_not_copy_long_memory() -> None:
    packed = received(pack([torch.ones(10_000), torch.ones(500, 30).t()], Outgoing(1)))
    arrived = unpack(packed, Incoming(0))
    assert [tensor.data_ptr() for tensor in arrived] == [storage.data_ptr() for storage in packed.storages]


def test_what_arrives_is_no_view_and_can_be_resized() -> None:
    arrived = travel(torch.arange(4.0)[1:])
    assert not arrived._is_view()
    assert arrived.resize_(100).shape == (100,)


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_sparse_tensors(coalesced: bool, dtype: torch.dtype) -> None:
    values = torch.tensor([[1, 0], [1, 1], [0, 1]]).to(dtype)
    sent = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (4, 2), check_invariants=True)
    sent = sent.coalesce() if coalesced else sent
    arrived = travel(sent)
    assert arrived.layout is torch.sparse_coo
    assert arrived.is_coalesced() == coalesced
    assert arrived.shape == sent.shape
    assert torch.equal(arrived._indices(), sent._indices())
    assert torch.equal(arrived._values(), sent._values())


def test_sparse_leaves_arrive_as_sparse_leaves() -> None:
    sent = torch.diag(torch.arange(3.0)).to_sparse().requires_grad_()
    outgoing = Outgoing(1)
    arrived = travel(sent, outgoing)
    assert arrived.requires_grad
    assert arrived.is_leaf
    assert [id(tensor) for tensor in outgoing.graded] == [id(sent)]
    assert not travel(sent.detach()).requires_grad


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors(layout: str) -> None:
    dense = torch.diag(torch.arange(1.0, 5.0))
    block = (2, 2) if layout.startswith("b") else None
    sent = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=block).requires_grad_()
    arrived = travel(sent)
    assert arrived.layout == sent.layout
    assert arrived.requires_grad
    assert torch.equal(arrived.detach().to_dense(), dense)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch's own use, for quantized ones
def test_tensors_that_reduce_themselves_go_out_of_band_too() -> None:
    class_of_its_own = torch.arange(1000.0).as_subclass(Marked)
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.qint8)
    packed = pack([class_of_its_own, quantized], Outgoing(1))
    assert memory_bytes(packed) == [4000, 4]
    first, second = unpack(received(packed), Incoming(0))
    assert type(first) is Marked
    assert torch.equal(first.as_subclass(torch.Tensor), torch.arange(1000.0))
    assert torch.equal(second.int_repr(), quantized.int_repr())
    assert second.q_scale() == 0.5


def test_a_subclass_shares_the_memory_of_a_plain_tensor() -> None:
    base = torch.arange(6.0)
    whole, part = travel([base, base[2:].as_subclass(Marked)])
    whole.zero_()
    assert part.tolist() == [0, 0, 0, 0]


def test_tensors_without_memory_travel() -> None:
    arrived = travel(torch.empty(3, 4, device="meta"))
    assert arrived.is_meta
    assert arrived.shape == (3, 4)


def test_a_tensor_whose_memory_was_freed_is_refused() -> None:
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \[100\].*storage holds 0 bytes"):
        pack([freed], Outgoing(1))
    with pytest.raises(RuntimeError, match=r"shape \[3\].*storage holds 0 bytes"):
        pack([torch._efficientzerotensor((3,))], Outgoing(1))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_tensors_of_a_transformation_are_refused(nested: bool) -> None:
    """They stand for others, and have no memory that could be sent."""

    def send(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UsageError, match="expected a tensor with memory of its own, got one of torch"):
            travel([tensor, 1] if nested else tensor)
        return tensor.sum()

    torch.func.vmap(send)(torch.ones(3, 2))
    torch.func.grad(send)(torch.ones(3, 2))
    torch.func.functionalize(send)(torch.ones(3, 2))


def test_tensors_of_a_gpu_without_a_place_to_go_are_refused() -> None:
    elsewhere: Any = SimpleNamespace(
        layout=torch.strided,
        dtype=torch.float32,
        is_nested=False,
        is_cpu=False,
        is_meta=False,
        shape=torch.Size([2]),
        device=torch.device("cuda", 1),
    )
    walk = MessagePickler(Pickler)
    walk.outgoing = Outgoing(1, what="Request to worker1")
    with pytest.raises(RuntimeError, match=r"RPC only supports CPU tensors.*shape \[2\] on cuda:1.*move your tensors"):
        reduce_tensor(walk, elsewhere)
    walk.outgoing = Outgoing(
        1, what="Request to worker1", device_map={torch.device("cuda", 0): torch.device("cuda", 1)}
    )
    with pytest.raises(RuntimeError, match=r"Request to worker1: .* not available for cuda:1; it has \['cuda:0'\]"):
        reduce_tensor(walk, elsewhere)


def test_a_default_device_does_not_matter() -> None:
    packed = received(pack([torch.ones(2), torch.empty(0)], Outgoing(1)))
    with torch.device("meta"):
        arrived: Any = unpack(packed, Incoming(0))
    assert [tensor.device.type for tensor in arrived] == ["cpu", "cpu"]


class Marked(torch.Tensor):
    """A subclass without anything of its own."""

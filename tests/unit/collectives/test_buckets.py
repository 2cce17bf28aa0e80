"""Tensors that are reduced together: which are joined, in buckets or by fusion, and how they are packed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import PreparedReduction, SoloBackend
from hvlike.backends.fusion_buffer import PackedReduction
from hvlike.collectives.controller.execution import fuse
from hvlike.collectives.controller.operations import Agreed
from hvlike.collectives.persistent.bucket import BucketPacker, pick
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.plan import (
    ACROSS_BUCKET_BYTES,
    DEVICE_BUCKET_BYTES,
    OVERLAPPED_BUCKET_BYTES,
    SINGLE_BUCKET_BYTES,
    choose_sizes,
    fill_buckets,
)
from hvlike.collectives.requests.request import Request, spec_of_tensors
from hvlike.transport.loop.coroutine import Coroutine

FLOATS = ("float32",) * 8


@pytest.mark.parametrize(
    ("sizes", "limit", "first", "expected"),
    [
        ([4, 4, 4, 4], 8, None, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], 8, 4, [[0], [1, 2], [3]]),
        ([4, 4, 4, 4], 8, 1, [[0], [1, 2], [3]]),
        ([4, 4, 4, 4], 4, 12, [[0, 1, 2], [3]]),
        ([9, 1, 1], 4, None, [[0], [1, 2]]),
        ([1, 9, 1], 4, 2, [[0], [1], [2]]),
        ([], 4, 2, []),
        ([0, 0, 5], 4, 1, [[0, 1], [2]]),
    ],
)
def test_limits(sizes: list[int], limit: int, first: int | None, expected: list[list[int]]) -> None:
    parts = [[index] for index in range(len(sizes))]
    assert fill_buckets(parts, sizes, FLOATS, limit, first) == expected


def test_the_first_limit_counts_for_the_first_bucket_of_all_dtypes_only() -> None:
    dtypes = ("float32", "float64", "float64", "float64")
    assert fill_buckets([[0], [1], [2], [3]], [4, 4, 4, 4], dtypes, 8, 4) == [[0], [1, 2], [3]]


def test_groups_stay_whole() -> None:
    assert fill_buckets([[0, 2], [1]], [4, 4, 4], FLOATS, 8, 2) == [[0, 2], [1]]


ONE_NODE, ALONE, PAIRS = ((0, 1),), ((0,), (1,)), ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("nodes", "overlaps", "slow_network", "expected"),
    [
        (ONE_NODE, True, False, OVERLAPPED_BUCKET_BYTES),
        (ONE_NODE, False, False, SINGLE_BUCKET_BYTES),
        (ALONE, False, False, SINGLE_BUCKET_BYTES),
        (ALONE, True, False, ACROSS_BUCKET_BYTES),
        (ALONE, False, True, ACROSS_BUCKET_BYTES),
        (PAIRS, False, False, ACROSS_BUCKET_BYTES),
    ],
)
def test_buckets_are_small_where_they_start_early_or_several_ranks_of_a_node_cross(
    nodes: tuple[tuple[int, ...], ...], overlaps: bool, slow_network: bool, expected: int
) -> None:
    sizes = choose_sizes(None, None, overlaps=overlaps, nodes=nodes, slow_network=slow_network)
    assert sizes == (expected, expected)


def test_what_the_user_sets_comes_before_what_suits() -> None:
    assert choose_sizes(7, None, overlaps=False, nodes=PAIRS) == (7, 7)
    assert choose_sizes(None, 5, overlaps=False, on_device=True) == (DEVICE_BUCKET_BYTES, 5)


def ask(name: str, *lengths: int, kind: str = "allreduce", op: int = 1) -> Agreed:
    """An operation on tensors of so many bytes."""
    tensors = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    request = Request(name, spec_of_tensors(kind, tensors, op=op), tensors, lambda request: None)
    return request, Response(request.key, request.spec)


def names(batches: list[list[Agreed]]) -> list[str]:
    return ["".join(request.name for request, _ in batch) for batch in batches]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(100, ["abcd"]), (30, ["abc", "d"]), (20, ["ab", "cd"]), (10, ["a", "b", "c", "d"]), (0, ["a", "b", "c", "d"])],
)
def test_neighbours_are_joined_up_to_the_limit(limit: int, expected: list[str]) -> None:
    assert names(fuse([ask(name, 10) for name in "abcd"], limit)) == expected


def test_other_kinds_and_ops_are_never_joined() -> None:
    agreed = [ask("a", 1), ask("b", 1, kind="broadcast"), ask("c", 1, kind="broadcast"), ask("d", 1), ask("e", 1, op=3)]
    assert names(fuse(agreed, 100)) == ["a", "bc", "d", "e"]


def test_a_large_operation_runs_alone() -> None:
    assert names(fuse([ask("a", 1), ask("b", 500), ask("c", 1)], 100)) == ["a", "b", "c"]


def test_groups_are_joined_with_others() -> None:
    agreed = [ask("a", 1), ask("b", 1, 1), ask("c", 1, 1), ask("d", 1), ask("e", 1)]
    assert names(fuse(agreed, 100)) == ["abcde"]


LARGE = 20_000
"""Elements of a float32 tensor that is not packed."""


class RecordingBackend(SoloBackend):
    """Notes what it is asked to reduce; small tensors go through a buffer."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction:
        return PackedReduction(self, self.allreduce, arithmetic)

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        self.seen = list(tensors)
        yield from super().allreduce(tensors, arithmetic)

    @property
    def lengths(self) -> list[int]:
        return [tensor.numel() for tensor in self.seen]


class PreparingBackend(SoloBackend):
    """Notes what it has prepared, and doubles it; two ranks are active."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        self.dtypes: set[torch.dtype] = set()

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction:
        self.lengths.append(list(lengths))
        self.dtypes.add(arithmetic.dtype)
        return self

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        for tensor in tensors:
            tensor.mul_(2)
        yield from ()
        return 2


def reduce(
    packer: BucketPacker, tensors: Sequence[torch.Tensor], backend: RecordingBackend | None = None
) -> RecordingBackend:
    """backend: that which the packer has had before."""
    backend = backend or RecordingBackend()
    for _ in packer.allreduce(backend, tensors, active=True):
        pass
    return backend


def doubling(dtype: torch.dtype = torch.float32) -> Arithmetic:
    return Arithmetic(dtype, ReduceOp.SUM, postscale=2.0)


def values(shape: Sequence[int]) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda tensor: tensor.contiguous(),
    "columns": lambda tensor: tensor.t().contiguous().t(),
    "every other": lambda tensor: torch.stack([tensor, tensor], 2)[:, :, 0],
}


@pytest.mark.parametrize("strides", [None, (1, 3)], ids=["row by row", "transposed"])
@pytest.mark.parametrize("shape", [(3, 4), (3, LARGE)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_reduced_in_the_agreed_order(
    layout: str, shape: tuple[int, int], strides: tuple[int, int] | None
) -> None:
    packer, backend = BucketPacker([strides, None], doubling()), RecordingBackend()
    for _ in range(2):
        tensor, scalar = LAYOUTS[layout](values(shape)), torch.tensor(1.5)
        before = tensor.stride()
        reduce(packer, [tensor, scalar], backend)
        assert torch.equal(tensor, 2 * values(shape))
        assert scalar.item() == 3.0
        assert tensor.stride() == before
        sent = torch.cat([each.view(-1) for each in backend.seen])
        agreed = 2 * (values(shape) if strides is None else values(shape).t())
        assert torch.equal(sent[:-1], agreed.reshape(-1))


def test_large_ones_stay_in_their_memory_and_empty_ones_are_left_out() -> None:
    packer = BucketPacker([None] * 4, doubling())
    tensors = [torch.ones(5), torch.ones(0, 3), torch.ones(2, LARGE), torch.ones(2, 2)]
    backend = reduce(packer, tensors)
    assert backend.lengths == [9, 2 * LARGE]
    assert backend.seen[1].data_ptr() == tensors[2].data_ptr()


def test_the_buffer_stays_and_follows_changed_shapes() -> None:
    packer, backend = BucketPacker([None, (1, 2)], doubling()), RecordingBackend()
    first = reduce(packer, [torch.ones(5), torch.ones(2, 2)], backend).seen[0]
    assert reduce(packer, [torch.ones(5), torch.ones(2, 2)], backend).seen[0].data_ptr() == first.data_ptr()
    changed = [torch.ones(1), torch.ones(4, 6)]
    assert reduce(packer, changed, backend).lengths == [25]
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in changed)


def test_a_buffer_of_another_dtype_casts() -> None:
    packer = BucketPacker([None] * 3, doubling(torch.bfloat16))
    tensors = [values((7,)), values((3, 3)), values((2, LARGE))]
    backend = reduce(packer, tensors)
    assert {tensor.dtype for tensor in backend.seen} == {torch.bfloat16}
    for tensor, shape in zip(tensors, ((7,), (3, 3), (2, LARGE)), strict=True):
        assert torch.equal(tensor, 2 * values(shape).bfloat16().float())


def test_tensors_that_are_cast_are_prepared_as_one_buffer_of_what_they_travel_as() -> None:
    shapes = [(7,), (3, 4), (0, 5), (), (2, LARGE)]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float64, torch.float16]
    packer = BucketPacker([None, (1, 3), None, None, None], doubling(torch.float16), dtypes)
    backend = PreparingBackend()
    agreed = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    agreed[1] = agreed[1].t().contiguous().t()
    others = [agreed[0].double(), agreed[1].contiguous(), *agreed[2:4], agreed[4].float()]
    for given, fitting in ((agreed, True), (others, False)):
        tensors = [tensor.clone() for tensor in given]
        assert list(packer.allreduce(backend, tensors, active=True)) == []
        assert packer.fits(tensors) == fitting
        for tensor, original in zip(tensors, given, strict=True):
            assert torch.equal(tensor, 2 * original.half().to(original.dtype))
    assert (backend.lengths, backend.dtypes) == ([[7 + 12 + 1 + 2 * LARGE]], {torch.float16})


def test_tensors_that_require_gradients_or_come_from_inference_mode_are_written_and_their_change_is_noted() -> None:
    with torch.inference_mode():
        inferred = [torch.ones(3), torch.ones(LARGE)]
    grown = [torch.ones(length, requires_grad=True) * 1 for length in (3, LARGE)]
    packer = BucketPacker([None] * 4, doubling())
    before = grown[0]._version
    reduce(packer, [*inferred, *grown])
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in (*inferred, *grown))
    assert grown[0]._version > before


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    numbers = torch.tensor([1 + 2j, 3j])
    for lazy in (numbers.conj(), numbers.conj().imag):
        expected = 2 * lazy.resolve_conj().resolve_neg()
        packer = BucketPacker([None, None], doubling(lazy.dtype))
        reduce(packer, [lazy, torch.ones(2, dtype=lazy.dtype)])
        assert torch.equal(lazy, expected)


@pytest.mark.parametrize(("indices", "expected"), [([], ()), ([1], ("b",)), ([2, 0], ("c", "a"))])
def test_picking(indices: list[int], expected: tuple[str, ...]) -> None:
    assert pick(indices)("abc") == expected

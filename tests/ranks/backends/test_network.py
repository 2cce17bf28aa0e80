"""The network backend by itself: every reduction follows the arithmetic, bitwise the same on all ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp, check_supported, op_name
from hvlike.backends.network import network, pairwise_reduction
from hvlike.backends.network.cost_model import Way
from hvlike.backends.network.network import Network
from hvlike.backends.network.partition import primes
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine, T
from hvlike.transport.memory.dtypes import TABLE, dtype_name, raw_view
from hvlike.transport.memory.never_freed import ABANDONED_REQUEST, kept_forever

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]


def supports(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        check_supported(op, dtype)
    except ValueError:
        return False
    return True


LENGTHS = [[], [0], [1], [5, 0, 3], [1000, 1, 70, 3000], [10000]]
OPS = [op for op in ReduceOp if op is not ReduceOp.ADASUM]
NAMES = ["swap", "pairwise", "slow pairwise", "doubling", "halving"]
# Which way reductions go; "chosen" is what is best for the size (two ranks swap).
DTYPES_OF_EVERY_WAY = (torch.float32, torch.bfloat16, torch.bool)
"""One that is reduced as it is, one in float32, one by logic; the way that is chosen takes all."""
WAYS = pytest.mark.parametrize("way", [*NAMES, "chosen"])


class Backend:
    """A network backend on all ranks, driven by hand."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.network = Network(self.comm.Dup())

    def drive(self, coroutine: Coroutine[T]) -> T:
        def run() -> Coroutine[None]:
            results.append((yield from coroutine))

        results: list[T] = []
        for _ in run():
            pass
        return results[0]

    def same_everywhere(self, tensor: torch.Tensor) -> bool:
        mine = raw_view(tensor).tobytes()
        return all(other == mine for other in self.comm.allgather(mine))


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.network.close()
    made.comm.Free()


def choose(monkeypatch: pytest.MonkeyPatch, backend: Backend, way: str) -> None:
    """Have all reductions go one way; "slow pairwise": as on a slow network, one message at a time."""
    # A network keeps the ways that it has chosen.
    backend.network.close()
    backend.network = Network(backend.comm.Dup())
    if way == "chosen":
        return
    levels = primes(backend.size) if way in ("doubling", "halving") else (backend.size,)
    forced = Way(way not in ("swap", "doubling"), levels)
    monkeypatch.setattr(network, "choose", lambda *_, **__: forced)
    # Two and three ranks have one level.
    monkeypatch.setattr(network, "is_direct", lambda _: way not in ("doubling", "halving"))
    monkeypatch.setattr(backend.network.bandwidth, "slow", way == "slow pairwise")


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have many messages in flight for few bytes."""
    for name, nbytes in {"SHORT_BYTES": 1024, "FIRST_BYTES": 256, "PACKED_BYTES": 512, "LARGEST_PACKET": 4096}.items():
        monkeypatch.setattr(pairwise_reduction, name, nbytes)


def contributions(rank: int, lengths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 4, (length,), generator=generator).to(dtype) for length in lengths]


def label(value: object) -> str | None:
    if isinstance(value, ReduceOp):
        return op_name(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize(
    ("way", "dtype", "op"),
    [
        (way, dtype, op)
        for way in (*NAMES, "chosen")
        for dtype in TABLE
        for op in OPS
        if supports(op, dtype) and (way == "chosen" or dtype in DTYPES_OF_EVERY_WAY)
    ],
    ids=label,
)
@pytest.mark.mpi
def test_allreduce_follows_the_arithmetic(
    backend: Backend,
    small_messages: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    op: ReduceOp,
    way: str,
) -> None:
    choose(monkeypatch, backend, way)
    factors: dict[str, Any] = (
        {} if dtype is torch.bool else {"divisor": backend.size, "prescale": 2.0, "postscale": 0.5}
    )
    arithmetic = Arithmetic(dtype, op, **factors)
    for lengths in LENGTHS:
        mine = contributions(backend.rank, lengths, dtype)
        backend.drive(backend.network.allreduce(mine, arithmetic))
        everybody = [contributions(rank, lengths, dtype) for rank in range(backend.size)]
        for result, (own, *others) in zip(mine, zip(*everybody, strict=True), strict=True):
            arithmetic.combine(arithmetic.view(own), [arithmetic.view(other) for other in others])
            # Small whole numbers: exact in every order of summation.
            assert torch.equal(result, own)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=dtype_name)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
@pytest.mark.mpi
def test_rounded_results_are_bitwise_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: ReduceOp, way: str
) -> None:
    choose(monkeypatch, backend, way)
    generator = torch.Generator().manual_seed(backend.rank)
    for length in (17, 50_001, 300_000):
        tensor = torch.randn(length, generator=generator).to(dtype)
        backend.drive(backend.network.allreduce([tensor], Arithmetic(dtype, op, postscale=0.3)))
        assert backend.same_everywhere(tensor)


@pytest.mark.mpi
def test_messages_may_be_longer_than_what_is_received_ahead(
    backend: Backend, small_messages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the user lets MPI send many MiB without asking.
    monkeypatch.setattr(pairwise_reduction, "AHEAD_BYTES", 512)
    choose(monkeypatch, backend, "pairwise")
    tensor = torch.full((50_000,), float(backend.rank))
    backend.drive(backend.network.allreduce([tensor], Arithmetic(torch.float32, ReduceOp.SUM)))
    assert torch.equal(tensor, torch.full((50_000,), float(sum(range(backend.size)))))


@WAYS
@pytest.mark.mpi
def test_nans_of_different_bits_give_the_same_nan(backend: Backend, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    choose(monkeypatch, backend, way)
    tensor = torch.full((1000,), 0x7FC00001 + backend.rank, dtype=torch.int32).view(torch.float32)
    backend.drive(backend.network.allreduce([tensor], Arithmetic(torch.float32, ReduceOp.SUM)))
    assert tensor.isnan().all()
    assert backend.same_everywhere(tensor)


@pytest.mark.mpi
def test_sixteen_bit_average_is_rounded_once(backend: Backend) -> None:
    tensor = torch.full((100_000,), 60000.0, dtype=torch.float16)
    backend.drive(
        backend.network.allreduce([tensor], Arithmetic(torch.float16, ReduceOp.AVERAGE, divisor=backend.size))
    )
    assert (tensor == 60000.0).all()


@pytest.mark.mpi
def test_gather_writes_each_tensor_from_its_owner(backend: Backend) -> None:
    owned = [(index % backend.size, torch.full((index * 1000,), float(backend.rank))) for index in range(7)]
    backend.drive(backend.network.gather(owned))
    for owner, tensor in owned:
        assert (tensor == owner).all()


@pytest.mark.mpi(min_size=2)
def test_a_routine_that_is_given_up_keeps_its_memory(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(kept_forever(ABANDONED_REQUEST))
    choose(monkeypatch, backend, "pairwise")
    tensor = torch.ones(100_000)
    coroutine = backend.network.allreduce([tensor], Arithmetic(torch.float32, ReduceOp.SUM))
    next(coroutine)
    coroutine.close()
    abandoned = kept_forever(ABANDONED_REQUEST)[before:]
    assert any(each is tensor for each in abandoned)
    # All ranks gave up at the same point: every message still in flight has its receive, and its memory.
    for request in abandoned:
        while request is not tensor and not request.Test():
            pass
    choose(monkeypatch, backend, "chosen")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.mpi
def test_rounded_results_do_not_depend_on_the_way(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(backend.rank)
    mine = [torch.randn(length, generator=generator).to(dtype) for length in (17, 90_001)]
    found = []
    for way in NAMES:
        choose(monkeypatch, backend, way)
        tensors = [each.clone() for each in mine]
        backend.drive(backend.network.allreduce(tensors, Arithmetic(dtype, ReduceOp.AVERAGE, divisor=3, prescale=0.7)))
        found.append([raw_view(each).tobytes() for each in tensors])
    assert all(each == found[0] for each in found)


@WAYS
@pytest.mark.mpi
def test_active_ranks_are_counted_with_the_data(backend: Backend, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    choose(monkeypatch, backend, way)
    tensors = [torch.full((length,), 1.0) for length in (3, 50_000)]
    prepared = backend.network.prepare([3, 50_000], Arithmetic(torch.float32, ReduceOp.SUM))
    if backend.size > 1:
        for active in range(backend.size + 1):
            for each in tensors:
                each.fill_(1.0)
            addresses = [each.data_ptr() for each in tensors]
            assert backend.drive(prepared.run(addresses, backend.rank < active, tensors)) == active
            assert all(bool((each == backend.size).all()) for each in tensors)


@WAYS
@pytest.mark.mpi(min_size=2)
def test_ranks_that_reduce_other_tensors_are_told(backend: Backend, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    choose(monkeypatch, backend, way)
    length = 2000 if backend.rank else 1000
    with pytest.raises(MismatchError, match="reduces other tensors at this point"):
        backend.drive(backend.network.allreduce([torch.ones(length)], Arithmetic(torch.float32, ReduceOp.SUM)))
    backend.comm.Barrier()
    choose(monkeypatch, backend, "chosen")

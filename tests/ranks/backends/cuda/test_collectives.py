"""Every collective takes tensors of a device: they come from one stream, and the results are used on another."""

import pytest
import torch
from ranks.backends.cuda.conftest import Late
from support.backends.streams import across_streams

from hvlike.backends.cuda import device_backend
from hvlike.transport.memory.dtypes import TABLE

DTYPES = [each for each in TABLE if each is not torch.bool]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that every dtype holds, and whose sums and products it holds for up to four ranks."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 3 + 1).reshape(shape).to(dtype)


@pytest.mark.parametrize("op", ["Sum", "Product", "Average"])
def test_allreduce(late: Late, op: str) -> None:
    hvd, shape = late.hvd, (5, 7)
    seen = across_streams(
        late,
        lambda: [values(hvd.rank(), shape, dtype) for dtype in DTYPES],
        lambda tensors: hvd.grouped_allreduce_async_(tensors, op=getattr(hvd, op), name=op),
    )
    for dtype, found in zip(DTYPES, seen, strict=True):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        stacked = torch.stack([values(each, shape, dtype).to(wide) for each in range(hvd.size())])
        expected = {"Sum": stacked.sum(0), "Product": stacked.prod(0), "Average": stacked.sum(0) / hvd.size()}[op]
        expected = expected if dtype.is_floating_point or dtype.is_complex else expected.trunc()
        assert found.dtype is dtype
        assert torch.allclose(found.to(wide), expected.to(dtype).to(wide), rtol=1e-6)


@pytest.mark.parametrize("op", ["Min", "Max"])
def test_extremes(late: Late, op: str) -> None:
    hvd = late.hvd

    def make(rank: int) -> list[torch.Tensor]:
        return [torch.arange(6.0) * (rank - 1), torch.arange(6) * (rank - 1), torch.arange(6).eq(rank)]

    seen = across_streams(
        late,
        lambda: make(hvd.rank()),
        lambda tensors: hvd.grouped_allreduce_async(tensors, op=getattr(hvd, op), name=op),
    )
    for found, *each in zip(seen, *map(make, range(hvd.size())), strict=True):
        stacked = torch.stack(each)
        assert torch.equal(found, stacked.amin(0) if op == "Min" else stacked.amax(0))


def test_factors(late: Late) -> None:
    hvd, dtypes = late.hvd, [torch.float32, torch.bfloat16, torch.int32]
    seen = across_streams(
        late,
        lambda: [torch.full((9,), 4 * (hvd.rank() + 1)).to(dtype) for dtype in dtypes],
        lambda tensors: hvd.grouped_allreduce_async(
            tensors, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="factors"
        ),
    )
    for dtype, found in zip(dtypes, seen, strict=True):
        assert torch.equal(found, torch.full((9,), 8 * sum(range(1, hvd.size() + 1))).to(dtype))


def test_a_large_tensor_goes_in_pieces(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_backend, "PIECE_BYTES", 4 << 10)
    rank, size = late.hvd.rank(), late.hvd.size()
    whole = torch.arange(30_000.0)
    pieces = -(-whole.nbytes // device_backend.PIECE_BYTES)
    assert pieces > 2 * device_backend.AHEAD
    (seen,) = across_streams(
        late,
        lambda: whole * (rank + 1),
        lambda tensor: late.hvd.allreduce_async_(tensor, op=late.hvd.Sum, name="pieces"),
    )
    assert torch.equal(seen, whole * sum(range(1, size + 1)))


def test_what_is_written_has_been_read_before(late: Late) -> None:
    device, rank, root = late.device, late.hvd.rank(), late.hvd.size() - 1
    producer = device.new_stream(device.home())
    with device.use(producer):
        tensor = torch.arange(100.0) + rank
        before = tensor.clone()
        late.hvd.broadcast_(tensor, root, name="overwritten")
    # Whatever comes first, the last of the backend's streams for one.
    for stream in [each for each in reversed(device.streams) if each is not producer] + [producer]:
        device.drain(stream)
    assert torch.equal(before, torch.arange(100.0) + rank)
    assert torch.equal(tensor, torch.arange(100.0) + root)


def test_large_and_many_and_odd_tensors_at_once(late: Late) -> None:
    rank, size = late.hvd.rank(), late.hvd.size()
    shapes = [(300_000,), (3,), (0,), (40, 50), ()]

    def make(rank: int) -> list[torch.Tensor]:
        plain = [torch.full(shape, rank + 1.0 + index) for index, shape in enumerate(shapes)]
        return [*plain, torch.full((6, 4), rank + 0.5).t(), torch.full((5, 5), 2.0 * rank, dtype=torch.float64)]

    seen = across_streams(
        late,
        lambda: make(rank),
        lambda tensors: late.hvd.grouped_allreduce_async_(tensors, op=late.hvd.Sum, name="many"),
    )
    for found, *each in zip(seen, *map(make, range(size)), strict=True):
        assert torch.equal(found, torch.stack(each).sum(0))


def test_calls_follow_one_another(late: Late) -> None:
    size = late.hvd.size()
    device = late.device
    stream = device.new_stream(device.home())
    with device.use(stream):
        tensor = torch.ones(1000)
        for _ in range(3):
            late.hvd.allreduce_(tensor, op=late.hvd.Sum, name="again")
            tensor.mul_(2)
        seen = tensor.clone()
    device.drain(stream)
    assert torch.equal(seen, torch.full((1000,), float((2 * size) ** 3)))


def test_tensors_of_inference_mode(late: Late) -> None:
    hvd = late.hvd
    with torch.inference_mode():
        seen = across_streams(
            late,
            lambda: [torch.full((40,), hvd.rank() + 1.0), torch.full((6, 5), 2.0).t()],
            lambda tensors: hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, postscale_factor=2.0, name="inference"),
        )
    assert torch.equal(seen[0], torch.full((40,), 2.0 * sum(range(1, hvd.size() + 1))))
    assert torch.equal(seen[1], torch.full((5, 6), 4.0 * hvd.size()))


def test_broadcast(late: Late) -> None:
    rank, root = late.hvd.rank(), late.hvd.size() - 1
    (seen,) = across_streams(
        late,
        lambda: torch.full((150_000,), float(rank)),
        lambda tensor: late.hvd.broadcast_async_(tensor, root, name="broadcast"),
    )
    assert torch.equal(seen, torch.full((150_000,), float(root)))


def test_allgather(late: Late) -> None:
    rank, size = late.hvd.rank(), late.hvd.size()
    (seen,) = across_streams(
        late,
        lambda: torch.full((rank, 3), rank, dtype=torch.int16),
        lambda tensor: late.hvd.allgather_async(tensor, name="rows"),
    )
    expected = torch.cat([torch.full((each, 3), each, dtype=torch.int16) for each in range(size)])
    assert torch.equal(seen, expected)


def test_alltoall(late: Late) -> None:
    rank, size = late.hvd.rank(), late.hvd.size()
    seen, received = across_streams(
        late,
        lambda: torch.cat([torch.full((to, 2), 10.0 * rank + to) for to in range(size)]),
        lambda tensor: late.hvd.alltoall_async(tensor, splits=list(range(size)), name="rows"),
    )
    assert received.tolist() == [rank] * size
    assert torch.equal(seen, torch.cat([torch.full((rank, 2), 10.0 * sender + rank) for sender in range(size)]))


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter(late: Late, op: str) -> None:
    rank, size = late.hvd.rank(), late.hvd.size()
    rows = [size * 2 // size + (each < 1) for each in range(size)]
    whole = torch.arange(sum(rows) * 3, dtype=torch.float32).reshape(sum(rows), 3)
    device = late.device
    producer, user = device.new_stream(device.home()), device.new_stream(device.home())
    with device.use(producer):
        tensor = whole * (rank + 1)
        handle = late.hvd.reducescatter_async(tensor, op=getattr(late.hvd, op), prescale_factor=2.0, name=f"rows {op}")
    with device.use(user):
        seen = late.hvd.synchronize(handle).clone()
        device.wait(user, device.record(producer))
        untouched = tensor.clone()
    device.drain(user)
    factor = 2 * sum(range(1, size + 1)) / (size if op == "Average" else 1)
    assert torch.equal(seen, torch.split(whole * factor, rows)[rank])
    assert torch.equal(untouched, whole * (rank + 1)), "the input is only read"


def test_adasum(late: Late) -> None:
    rank, size = late.hvd.rank(), late.hvd.size()
    (seen,) = across_streams(
        late,
        lambda: torch.arange(size).eq(rank).float(),
        lambda tensor: late.hvd.allreduce_async(tensor, op=late.hvd.Adasum, name="adasum"),
    )
    assert torch.equal(seen, torch.ones(size)), "orthogonal vectors are summed"


def test_results_are_kept_for_the_stream_that_uses_them(late: Late) -> None:
    device = late.device
    producer, user = device.new_stream(device.home()), device.new_stream(device.home())
    with device.use(producer):
        tensor = torch.ones(4, 4)
        handle = late.hvd.allgather_async(tensor, name="kept")
    with device.use(user):
        result = late.hvd.synchronize(handle)
    kept = [(each.data_ptr(), stream) for each, stream in device.kept]
    assert (result.data_ptr(), user) in kept
    assert any(pointer == tensor.data_ptr() and stream not in (producer, user) for pointer, stream in kept)
    device.drain(user)

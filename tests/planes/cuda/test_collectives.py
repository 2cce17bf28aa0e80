"""Every collective takes tensors of a device: what comes before it, and what comes after it, is on other streams."""

import pytest
import torch
from planes.cuda.conftest import Late


def on_streams(late: Late, make, call):
    """Values made on one stream, a call from there, waited for from a second one, and looked at on that."""
    device = late.device
    producer, user = device.new_stream(device.home()), device.new_stream(device.home())
    with device.use(producer):
        tensor = make()
        handle = call(tensor)
    with device.use(user):
        seen = [each.clone() for each in listed(late.hvd.synchronize(handle))]
    device.drain(user)
    return seen


def listed(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(3,), (5, 7), (300_001,)], ids=str)
def test_allreduce(late: Late, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rank, size = late.hvd.rank(), late.hvd.size()
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == rank % 2
    for _ in range(2):
        (seen,) = on_streams(
            late,
            lambda: values.to(dtype),
            lambda tensor: late.hvd.allreduce_async_(tensor, op=late.hvd.Sum, name="one"),
        )
        even, odd = (size + 1) // 2, size // 2
        expected = torch.where(values if rank % 2 == 0 else ~values, even, odd).to(dtype)
        assert torch.equal(seen, expected)

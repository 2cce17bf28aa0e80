"""A call whose tensors come from one stream and whose results are used on another."""

from collections.abc import Callable
from typing import Any

from ranks.backends.cuda.conftest import Late
from torch import Tensor


def across_streams(late: Late, make: Callable[[], Any], call: Callable[[Any], Any]) -> list[Tensor]:
    """Make tensors on one stream, call from there, wait and look at the results on a second one.

    call: returns a handle. Returns copies of the results, in order.
    """
    device = late.device
    producer, user = device.new_stream(device.home()), device.new_stream(device.home())
    with device.use(producer):
        handle = call(make())
    with device.use(user):
        seen = [each.clone() for each in _tensors(late.hvd.synchronize(handle))]
    device.drain(user)
    return seen


def _tensors(result: Any) -> list[Tensor]:
    return [each for part in result for each in _tensors(part)] if isinstance(result, (list, tuple)) else [result]

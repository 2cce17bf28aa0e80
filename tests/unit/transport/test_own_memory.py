"""Which tensors have memory of their own: all that only look like it are told apart."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.without_memory import IN_PLACE, KINDS, Named, Wrapper
from torch import Tensor

from hvlike.errors import ProcessGroupError, UsageError
from hvlike.transport.memory.dtypes import bytes_at, bytes_of, runs_at
from hvlike.transport.memory.own_memory import check_memory, first_without, has_memory

PLAIN: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: torch.ones(3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "subclass": lambda: torch.ones(3).as_subclass(Named),
    "empty": lambda: torch.ones(0, 3),
    "scalar": lambda: torch.tensor(1.0),
    "view": lambda: torch.ones(4, 4)[1:, ::2],
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "of numpy": lambda: torch.from_numpy(np.ones(3)),
    "shared": lambda: torch.ones(3).share_memory_(),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
    "requires grad": lambda: torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_tensors_have_memory(make: Callable[[], Tensor]) -> None:
    assert has_memory(make())
    assert first_without([make(), [make()]]) is None


@pytest.mark.filterwarnings("ignore")  # What torch warns of in torch.func, and of nested tensors
@pytest.mark.parametrize("kind", (KINDS | IN_PLACE).values(), ids=KINDS | IN_PLACE)
def test_others_are_refused(kind: tuple[Callable[[Callable[[Tensor], Any]], Any], str]) -> None:
    hand, named = kind
    refused: list[str] = []
    plain = torch.ones(2)

    def use(tensor: Tensor) -> Tensor:
        assert not has_memory(tensor)
        assert first_without([plain, [tensor]]) is tensor
        with pytest.raises(ProcessGroupError) as raised:
            check_memory("send 'x'", tensor, ProcessGroupError)
        refused.append(str(raised.value))
        return tensor.sum() if named == "one of torch.func" else tensor

    hand(use)
    assert f"send 'x': expected a tensor with memory of its own, got {named}" in refused[0]


def test_a_subclass_does_not_answer_for_what_it_wraps() -> None:
    class Talkative(Wrapper):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.data_ptr:
                return args[0].inner.data_ptr()
            return super().__torch_function__(function, types, args, kwargs or {})

    wrapper = Talkative(torch.ones(3))
    assert wrapper.data_ptr()
    assert not has_memory(wrapper)


def test_no_bytes_are_viewed_where_there_are_none() -> None:
    for view in (
        lambda: bytes_at(0, 8),
        lambda: bytes_of(torch._efficientzerotensor((3,))),
        lambda: runs_at([4096, 0], [(0, 0, 8), (1, 0, 8)]),
    ):
        with pytest.raises(UsageError, match="without an address"):
            view()
    assert not bytes_at(0, 0).size
    assert not bytes_of(torch.ones(0)).size
    assert not runs_at([0], [])

"""What programs keep in buffers and in options of parameter groups, and what few libraries expect there."""

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor


class Raises:
    """Every method that a curious reader may call raises."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("not to be looked at")

    __eq__ = __ne__ = __repr__ = __str__ = __len__ = __iter__ = __bool__ = __float__ = __reduce_ex__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class TextThatRaises(str):
    """A text whose own methods raise."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("not to be looked at")

    __str__ = __repr__


class NumberThatRaises(float):
    """A number whose own methods raise."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be looked at")

    __str__ = __repr__


class EqualsTensor:
    """As tensors do, it answers a comparison with a tensor of several elements."""

    def __eq__(self, other: object) -> Any:
        return torch.zeros(2)

    __hash__ = None  # type: ignore[assignment]


def nested_list() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = []
    found.append(found)
    return found


def strange_tensors() -> dict[str, Tensor]:
    """One of each kind that has no plain memory, or lies in it otherwise."""
    with warnings.catch_warnings():
        # torch tells that some of them are new.
        warnings.simplefilter("ignore")
        return _made()


STRANGE = [
    *("complex", "conjugate", "csr", "empty", "expanded", "half", "jagged"),
    *("meta", "negative", "nested", "quantized", "scalar", "sparse", "transposed"),
]


def _made() -> dict[str, Tensor]:
    eye = torch.eye(3)
    return {
        "sparse": eye.to_sparse(),
        "csr": eye.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "meta": torch.empty(2, device="meta"),
        "complex": torch.complex(eye, eye),
        "conjugate": torch.complex(eye, eye).conj(),
        "negative": torch.complex(eye, eye).conj().imag,
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.ones(1).expand(4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
        "half": torch.ones(2, dtype=torch.float16),
    }


def strange_options() -> dict[str, Any]:
    """Options of a parameter group."""
    return {
        "raises": Raises(),
        "text": TextThatRaises("a"),
        "number": NumberThatRaises(0.5),
        "equals": EqualsTensor(),
        "itself": nested_list(),
        "unhashable": {"a": [1]},
        "function": lambda step: step,
        "tensors": [torch.ones(2), torch.ones(1), Raises()],
        **strange_tensors(),
    }

"""What reports, drawings and profiles call a function."""

from functools import partial
from typing import Any

import pytest
import torch

from hvlike.rpc.wire.message import function_name


class Scale:
    """Can be called, and has a method."""

    def __call__(self, value: float) -> float:
        return 2 * value

    def half(self, value: float) -> float:
        return value / 2


NAMES: dict[str, Any] = {
    "aten::mul": torch.mul,
    "aten::linalg_norm": torch.linalg.norm,
    "min": min,
    "Scale": Scale,
    "Scale.half": Scale().half,
    "function_name": function_name,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_function_has_the_name_that_people_know(name: str) -> None:
    assert function_name(NAMES[name]) == name


@pytest.mark.parametrize("name", ["Scale", "partial"])
def test_what_has_no_name_is_called_by_its_class(name: str) -> None:
    assert function_name({"Scale": Scale(), "partial": partial(min, 1)}[name]) == name

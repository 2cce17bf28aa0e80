"""Every tensor that hvlike makes says where: programs may call torch.set_default_device("cuda")."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hvlike

PACKAGE = Path(hvlike.__file__).parent
MEASURING = ("bench", "doctor")
"""These run alone, not within a program."""

MAKERS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "tensor",
    "zeros",
}
"""The functions of torch that heed the default device."""


def calls_without_device(source: str) -> Iterator[int]:
    """The lines on which a tensor is made without a word on its device."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKERS
            and all(keyword.arg != "device" for keyword in node.keywords)
        ):
            yield node.lineno


def test_no_tensor_is_made_on_the_default_device() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MEASURING
        for line in calls_without_device(path.read_text())
    ]
    assert not found, f"add device= (of the tensors at hand, or 'cpu'): {', '.join(found)}"


def test_a_forgotten_device_is_seen() -> None:
    assert list(calls_without_device("x = torch.zeros(3)\ny = torch.zeros(3, device='cpu')\nz = torch.relu(y)")) == [1]

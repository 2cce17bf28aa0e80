"""The gradients of a model that the user names: a number of parameters, or a function of a file that makes it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from hvlike.errors import UsageError

_PART = 1 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Model:
    """What a training of it reduces in each step."""

    name: str
    sizes: tuple[int, ...]
    """Bytes of each gradient, in the order in which backward brings them."""
    dtypes: tuple[str, ...]


def is_number(text: str) -> bool:
    """Whether `text` is a number of parameters, as 25000000, 25_000_000 or 25e6."""
    try:
        return float(text) >= 1
    except ValueError:
        return False


def collect(text: str) -> Model:
    """Read a number of float32 parameters, or run FILE.py:function, which is the user's code.

    Raises: UsageError for what is neither, or makes no torch.nn.Module.
    """
    if is_number(text):
        whole, rest = divmod(int(float(text)), _PART)
        parts = [_PART] * whole + [rest] * (rest > 0)
        sizes = tuple(_FLOAT_BYTES * part for part in parts)
        return Model(f"{int(float(text)):,} float32 parameters", sizes, ("float32",) * len(parts))
    path, colon, name = text.rpartition(":")
    if not colon or not Path(path).is_file():
        raise UsageError(
            f"--model {text}: expected a number of parameters, or FILE.py:function with a file that exists."
        )
    made = getattr(_load(Path(path)), name, None)
    model = made() if callable(made) else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {text}: {name} makes {type(model).__name__}, expected a torch.nn.Module.")
    trained = [each for each in model.parameters() if each.requires_grad]
    trained.reverse()
    return Model(
        f"{type(model).__name__} of {path}",
        tuple(each.numel() * each.element_size() for each in trained),
        tuple(str(each.dtype).removeprefix("torch.") for each in trained),
    )


def _load(path: Path) -> object:
    """The module of a file; what it imports may lie beside it."""
    specification = importlib.util.spec_from_file_location("hvlike_doctor_model", path)
    if specification is None or specification.loader is None:
        raise UsageError(f"--model {path}: not a Python file.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    specification.loader.exec_module(module)
    return module

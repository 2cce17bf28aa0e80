"""torch.compile traces nothing of hvlike: every public function and method, and every hook, is marked as one to run."""

import enum
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import hvlike
from hvlike.untraced import REASON, is_untraced

HOUSE = Path(hvlike.__file__).parent
MODULES = ["names", "join", "nn", "optim", "elastic", "checkpoint", "rpc", "autograd"]
STARTING = {"horovod", "run"}  # What starts jobs
INTEGRATIONS = ["huggingface", "lightning", "pytorch_lightning"]

# A module's forward is compiled with what it calls; what asks for the place of a rank is a constant of a graph.
TRACED = {
    "DistributedDataParallel.forward",
    "SyncBatchNorm.forward",
    *("ProcessSet.size", "ProcessSet.rank", "ProcessSet.included"),
    *("is_initialized", "is_homogeneous", "size", "rank", "local_size", "local_rank", "cross_size", "cross_rank"),
}


def functions_of(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, staticmethod | classmethod):
        yield member.__func__
    elif isinstance(member, property):
        yield from (each for each in (member.fget, member.fset, member.fdel) if each is not None)


def is_ours(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith("hvlike")


def public_functions(module: Any) -> Iterator[FunctionType]:
    for name in module.__all__:
        target = getattr(module, name)
        if isinstance(target, FunctionType) and is_ours(target):
            yield target
        elif isinstance(target, type) and not issubclass(target, BaseException | enum.Enum):
            for kind in filter(is_ours, target.__mro__):
                for key, member in vars(kind).items():
                    if not key.startswith("_") or key.startswith("__"):
                        yield from functions_of(member)


def test_all_public_modules_are_listed() -> None:
    paths = [*HOUSE.glob("*.py"), *HOUSE.glob("*/__init__.py")]
    named = [path for path in paths if "\n__all__ = " in path.read_text()]
    assert {path.parent.name if path.stem == "__init__" else path.stem for path in named} - STARTING == set(MODULES)


@pytest.mark.parametrize("name", [*MODULES, *(f"integrations.{each}" for each in INTEGRATIONS)])
def test_public_functions(name: str) -> None:
    if name.startswith("integrations"):
        pytest.importorskip({"huggingface": "transformers"}.get(name.partition(".")[2], "lightning"))
    module: Any = importlib.import_module("hvlike.names" if name == "names" else f"hvlike.{name}")
    found = list(public_functions(hvlike if name == "names" else module))
    assert found
    marked = [each for each in found if getattr(each, "_torchdynamo_disable", False)]
    assert {each.__qualname__ for each in found if each not in marked} <= TRACED | STARTING
    assert all(vars(each)["_torchdynamo_disable_msg"] == REASON for each in marked)
    assert all(is_untraced(each.__code__) for each in marked if each.__code__.co_filename.startswith(str(HOUSE)))

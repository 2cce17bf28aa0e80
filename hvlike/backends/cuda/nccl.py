"""NCCL through CuPy: the only file that imports cupy. What of it is used is listed here and nowhere else.

CuPy's `cupy.cuda.nccl` calls the libnccl.so.2 that the process has loaded already, where there is one: torch is
imported first, so it is torch's. Its calls take addresses and release the interpreter's lock.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hvlike.transport.host.mpi_library import mapped_files

ID_BYTES = 128

SPLITS_FROM = 21801  # The first version, 2.18.1, whose communicators can be split
_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")
# NCCL_SUM and so on, NCCL_INT8 and so on.
_OPS = ("sum", "avg", "min", "max", "prod")
_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class NcclFacts(NamedTuple):
    """What is installed. Plain values."""

    cupy: str
    version: int  # Version of NCCL in its own notation, 22703 for 2.27.3; 0 where it cannot be used
    missing: str  # Why it cannot be used and what to do; empty where it can
    path: str
    torch_version: int


class Nccl:
    """The module `cupy.cuda.nccl`, by its meaning."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.version = int(module.get_version())
        known = {name: f"NCCL_{name.upper()}" for name in _OPS + _DTYPES}
        numbers = {name: int(getattr(module, known[name])) for name in known if hasattr(module, known[name])}
        self.ops = {name: numbers[name] for name in _OPS if name in numbers}  # Those that this version has
        self.dtypes = {getattr(torch, name): numbers[name] for name in _DTYPES if name in numbers}

    def new_id(self) -> bytes:
        number = self._module.get_unique_id()
        # CuPy before 14 has it as numbers of one signed byte.
        return number if isinstance(number, bytes) else bytes(each & 255 for each in number)

    def connect(self, size: int, number: bytes, rank: int) -> Communicator:
        """Join the communicator with this number. Blocks until all ranks do: never in the loop."""
        make = self._module.NcclCommunicator
        try:
            link = make(size, number, rank)
        except TypeError:
            # CuPy before 14, which refuses the form before it does anything.
            link = make(size, tuple((each ^ 128) - 128 for each in number), rank)
        return Communicator(self, link)

    @contextmanager
    def group(self) -> Iterator[None]:
        self._module.groupStart()
        try:
            yield
        finally:
            self._module.groupEnd()


class Communicator:
    """The ranks of a group, each with its GPU. Calls put work into a stream and return."""

    def __init__(self, nccl: Nccl, link: Any) -> None:
        self.nccl = nccl
        self.link = link
        self._ended = threading.Lock()

    @property
    def splits(self) -> bool:
        return self.nccl.version >= SPLITS_FROM and hasattr(self.link, "commSplit")

    def split(self, rank: int) -> Communicator:
        """Another communicator of the same ranks. Blocks until all ranks do; nothing may be in flight in this one."""
        return Communicator(self.nccl, self.link.commSplit(0, rank))

    def error(self) -> Exception | None:
        try:
            self.link.check_async_error()
        except Exception as error:
            # Not always an NcclError: CuPy 14.2 has no names for the newer ones and stumbles over them.
            return error
        return None

    def abort(self) -> None:
        """End what is in flight, in a thread, as that may take a moment; once."""
        if self._ended.acquire(blocking=False):
            threading.Thread(target=self.link.abort, name="hvlike-nccl-abort", daemon=True).start()


def load() -> Nccl:
    """NCCL, if CuPy has it here. Raises: ImportError, RuntimeError, with the reason."""
    module = importlib.import_module("cupy.cuda.nccl")
    if not getattr(module, "available", True):
        raise ImportError("cupy.cuda.nccl finds no libnccl.so.2")
    return Nccl(module)


def describe() -> NcclFacts:
    """What of NCCL is installed. Never raises; loads CuPy and libnccl, but starts no GPU. Local."""
    cupy, theirs = _installed_cupy(), _version_of_torch()
    try:
        version, missing = load().version, ""
    except Exception as error:
        cuda = (torch.version.cuda or "12").split(".")[0]
        reason = f"CuPy {cupy} is installed, but {error}" if cupy else "CuPy is not installed"
        version, missing = 0, f"{reason}: pip install hvlike[cuda{cuda}]"
    return NcclFacts(cupy, version, missing, next(iter(mapped_files("/libnccl.so")), ""), theirs)


def _installed_cupy() -> str:
    found = (each for name in _DISTRIBUTIONS for each in importlib.metadata.distributions(name=name))
    return next((each.version for each in found), "")


def _version_of_torch() -> int:
    find: Callable[[], tuple[int, ...]] | None = getattr(getattr(torch.cuda, "nccl", None), "version", None)
    try:
        major, minor, patch = find()[:3] if find is not None else (0, 0, 0)
    except (RuntimeError, AttributeError, ValueError):
        return 0
    return major * 10000 + minor * 100 + patch

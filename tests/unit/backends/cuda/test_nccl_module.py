"""What of CuPy is used, in the forms its versions have; and what is said where there is none."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.backends.cuda import nccl


class Link:
    """A communicator that remembers how it was made."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.failure: Exception | None = None

    def check_async_error(self) -> None:
        if self.failure is not None:
            raise self.failure


def old_link(size: int, number: tuple[int, ...], rank: int) -> Link:
    """As CuPy 13 has it."""
    if not isinstance(number, tuple):
        raise TypeError("Argument 'commId' has incorrect type (expected tuple, got bytes)")
    return Link(size, number, rank)


NUMBER = bytes(range(128, 256))
NEW = SimpleNamespace(get_version=lambda: 23203, get_unique_id=lambda: NUMBER, NcclCommunicator=Link, NCCL_SUM=0)
OLD = SimpleNamespace(
    get_version=lambda: 21805,
    get_unique_id=lambda: tuple(each - 256 for each in NUMBER),
    NcclCommunicator=old_link,
    NCCL_SUM=0,
)


def test_numbers_of_communicators_travel_as_bytes() -> None:
    for module, expected in ((NEW, NUMBER), (OLD, OLD.get_unique_id())):
        library = nccl.Nccl(module)
        number = library.new_id()
        assert number == NUMBER
        assert library.connect(3, number, 2).link.arguments == (3, expected, 2)


def test_what_a_version_has_not_is_left_out() -> None:
    library = nccl.Nccl(NEW)
    assert (library.ops, library.dtypes) == ({"sum": 0}, {})


def test_any_error_of_the_check_is_an_error_of_the_communicator() -> None:
    link = Link()
    communicator = nccl.Communicator(nccl.Nccl(NEW), link)
    assert communicator.error() is None
    link.failure = KeyError(6)
    assert communicator.error() is link.failure


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    facts = nccl.describe()
    assert facts.version == 0
    assert "pip install hvlike[cuda1" in facts.missing

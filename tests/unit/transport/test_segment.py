"""Segments: shared by either way, zeroed, and gone with the processes."""

import os
import tempfile
from typing import Any

import pytest

from hvlike.errors import LaunchError
from hvlike.system.mapped_memory import SegmentLocation, SegmentOffer, accept, make_offer
from hvlike.system.system import system
from hvlike.transport.memory import segment


@pytest.mark.parametrize("memfd", [True, False])
def test_an_offer_is_mapped_by_who_accepts_it_and_leaves_no_name(memfd: bool) -> None:
    made = SegmentOffer(4096, memfd=memfd)
    mapped = accept(made.offer)
    assert mapped is not None
    assert made.segment is not None
    made.withdraw()
    assert not os.path.exists(made.offer.path)
    assert not mapped.array.any()
    made.segment.array[100] = 7
    assert mapped.array[100] == 7


def test_another_file_under_the_same_path_is_not_mistaken_for_the_offer() -> None:
    made = SegmentOffer(4096, memfd=True)
    assert made.segment is not None
    made.segment.array[:16] = 0
    assert accept(made.offer) is None
    made.withdraw()


def test_an_offer_that_cannot_be_opened_or_has_another_size_is_declined() -> None:
    made = SegmentOffer(4096, memfd=False)
    offer = made.offer
    made.withdraw()
    assert accept(offer) is None
    other = SegmentOffer(8192, memfd=True)
    assert accept(SegmentLocation(other.offer.path, 4096, other.offer.cookie)) is None
    other.withdraw()


def test_memory_that_the_system_refuses_is_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = tempfile.mkstemp

    def recording(**arguments: str) -> tuple[int, str]:
        file, path = make(**arguments)
        made.append(path)
        return file, path

    monkeypatch.setattr(tempfile, "mkstemp", recording)
    assert make_offer(1 << 62, 0) is None
    assert make_offer(1 << 62, 1) is None
    assert [os.path.exists(path) for path in made] == [False]


class Alone:
    """A communicator of one rank."""

    rank = 0

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def test_ranks_that_cannot_share_are_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "make_offer", lambda nbytes, attempt: None)
    with pytest.raises(LaunchError, match="--shm-size"):
        segment.share(Alone(), 4096)

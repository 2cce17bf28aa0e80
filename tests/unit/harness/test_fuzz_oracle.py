"""The oracle of random programs: what a simulated rank learns of the others never depends on the moment."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.fuzz.oracle import Absent, Exchange

RANKS = (0, 1)


def test_all_get_what_all_bring_and_by_number() -> None:
    exchange = Exchange(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(lambda rank=rank: [exchange.gather(rank, (rank, each), RANKS) for each in range(100)])
            for rank in RANKS
        )
    assert first.result() == second.result() == [[(0, each), (1, each)] for each in range(100)]


def test_what_a_rank_has_brought_stays_when_it_leaves() -> None:
    exchange = Exchange(2)
    came: list[Any] = []
    other = threading.Thread(target=lambda: came.append(exchange.gather(1, "from 1", RANKS)))
    other.start()
    assert exchange.gather(0, "from 0", RANKS) == ["from 0", "from 1"]
    exchange.leave(0)
    other.join()
    assert came == [["from 0", "from 1"]]
    with pytest.raises(Absent):
        exchange.gather(1, "again", RANKS)


def test_a_rank_that_left_is_absent_only_from_its_own_sets() -> None:
    exchange = Exchange(3)
    exchange.leave(2)
    assert exchange.gather(1, "alone", (1,)) == ["alone"]
    with pytest.raises(Absent):
        exchange.gather(1, "with 2", (1, 2))

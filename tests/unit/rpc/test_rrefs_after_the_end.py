"""Threads that still use RRefs when the session is over neither fail nor wait for ever."""

from __future__ import annotations

import pytest

from hvlike.errors import RpcError
from hvlike.rpc.rrefs.lifetime import Fork, GlobalId, Lifetime

HERE, OTHER = 0, 1
OVER = RpcError("over")


@pytest.fixture
def lifetime() -> Lifetime:
    return Lifetime(HERE)


def test_a_creation_that_is_acknowledged_late_is_forgotten(lifetime: Lifetime) -> None:
    """Once it was taken out of a table that was empty: a KeyError in a background thread (simulated job 5)."""
    fork = Fork(lifetime.new_id(), lifetime.new_id(), OTHER)
    lifetime.begin(fork)
    lifetime.drop(fork)
    lifetime.end(OVER)
    lifetime.confirm(fork)
    assert not lifetime.take_effects().notices


def test_a_value_that_is_begun_late_fails(lifetime: Lifetime) -> None:
    """Once who used an RRef that remote() had made here meanwhile waited for ever (simulated job 31)."""
    lifetime.end(OVER)
    entry = lifetime.create(lifetime.new_id(), None, HERE)
    assert entry.settled
    assert entry.failure is OVER


def test_so_does_a_value_that_is_first_heard_of_late(lifetime: Lifetime) -> None:
    lifetime.end(OVER)
    entry = lifetime.find(GlobalId(OTHER, 3))
    assert entry.settled
    assert entry.failure is OVER


def test_the_end_settles_what_is_waited_for_once(lifetime: Lifetime) -> None:
    entry = lifetime.create(lifetime.new_id(), None, HERE)
    told: list[object] = []
    lifetime.when_settled(entry, lambda: told.append(entry.failure))
    lifetime.end(OVER)
    for answer in lifetime.take_effects().answers:
        answer()
    assert told == [OVER]
    lifetime.settle(entry, 7, None)
    assert entry.failure is OVER

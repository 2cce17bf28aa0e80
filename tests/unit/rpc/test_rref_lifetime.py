"""No order of messages loses a value that somebody has, or keeps one that nobody has, also after the session."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rpc.rref_world import World

from hvlike.errors import RpcError
from hvlike.rpc.rrefs.lifetime import Fork, GlobalId, Lifetime

ACTS = (
    ["remote", "remote", "local", "send", "send", "send", "unsent", "drop", "drop", "fetch", "fetch"]
    + ["deliver"] * 8
    + ["finish"] * 2
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(ACTS),
        # One of the oldest or newest few: programs whose steps never meet prove little.
        st.integers(-4, 4),
        st.integers(-4, 4),
    ),
    min_size=10,
    max_size=120,
)


def step(world: World, what: str, one: int, two: int) -> None:
    size = len(world.workers)
    if what == "remote":
        world.remote(one % size, two % size)
    elif what == "local":
        world.local(one % size)
    elif what == "deliver" and world.flying:
        world.deliver(one % len(world.flying))
    elif what == "finish" and world.running:
        world.running.pop(one % len(world.running)).happen()
    elif world.held and what in ("send", "unsent", "drop", "fetch"):
        held = world.held[one % len(world.held)]
        if what == "drop":
            world.drop(held)
        elif what == "fetch":
            world.fetch(held)
        else:
            world.send(held, two % size, fails=what == "unsent")


def end(world: World, choose: Callable[[int], int]) -> None:
    """Every program lets go of what it holds, also of what still arrives."""
    while world.held or world.flying or world.running:
        for held in list(world.held):
            world.drop(held)
        world.run_out(choose)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(size=st.integers(1, 4), steps=STEPS, seed=st.integers(0, 2**20))
def test_values_live_exactly_as_long_as_their_forks(size, steps, seed):
    world = World(size)
    choose = random.Random(seed).randrange
    for what, one, two in steps:
        step(world, what, one, two)
        world.check_alive()
    end(world, choose)
    world.check_empty()


def test_who_is_lost_or_leaves_keeps_nothing_alive_and_nobody_waiting() -> None:
    """Once the notice of a child of a fork came after the value had been freed, as whom the child was sent to had left
    (simulated job 64008173): its owner kept a value that nobody was to make, and who asked for it waited for ever.
    """
    for seed in range(4_000):
        draw = random.Random(seed)
        world = World(draw.randint(2, 4))
        for _ in range(draw.randint(5, 80)):
            step(world, draw.choice(ACTS), draw.randint(-4, 4), draw.randint(-4, 4))
        gone = draw.randrange(len(world.workers))
        (world.lose if draw.random() < 0.3 else world.leave)(gone)
        for _ in range(draw.randint(0, 60)):
            what = draw.choice(ACTS)
            if what not in ("remote", "local", "send"):
                step(world, what, draw.randint(-4, 4), draw.randint(-4, 4))
        end(world, draw.randrange)
        world.check_empty(f"seed {seed}")


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

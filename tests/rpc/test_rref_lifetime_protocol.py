"""No order of messages loses a value that somebody has, or keeps one that nobody has."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from rpc.rref_world import World

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["remote", "remote", "local", "send", "send", "send", "unsent", "drop", "drop", "fetch", "fetch"]
            + ["deliver"] * 8
            + ["finish"] * 2
        ),
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
        world.flying.pop(one % len(world.flying))()
    elif what == "finish" and world.running:
        world.running.pop(one % len(world.running))()
    elif world.held and what in ("send", "unsent", "drop", "fetch"):
        held = world.held[one % len(world.held)]
        if what == "drop":
            world.drop(held)
        elif what == "fetch":
            world.fetch(held)
        else:
            world.send(held, two % size, fails=what == "unsent")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(size=st.integers(1, 4), steps=STEPS, seed=st.integers(0, 2**20))
def test_values_live_exactly_as_long_as_their_forks(size, steps, seed):
    world = World(size)
    choose = random.Random(seed).randrange
    for what, one, two in steps:
        step(world, what, one, two)
        world.check_alive()
    while world.held or world.flying or world.running:
        # Messages still under way carry RRefs, which are held when they arrive.
        for held in list(world.held):
            world.drop(held)
        world.run_out(choose)
        world.check_alive()
    world.check_empty()

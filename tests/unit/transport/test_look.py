"""How long a thread that has nothing else to do looks at its doorbell before it sleeps."""

import pytest

from hvlike.transport.loop import spin
from hvlike.transport.loop.spin import SpinPolicy, new_spin_policy

SPINS = 10
TICK = 1e-6


def looks_of(look: SpinPolicy, *, seconds_each: float = TICK, busily: bool = False, most: int = 100_000) -> int:
    """How many looks it makes, each of them so long."""
    now = 0.0
    for count in range(most):
        now += seconds_each
        if not look.goes_on(now, busily):
            return count
    return most


def test_without_rpc_a_few_looks_are_made() -> None:
    assert looks_of(new_spin_policy(0.0, SPINS, serves=False, crowded=False, busily=False)) == SPINS


def test_slow_looks_without_rpc_end_by_time() -> None:
    look = new_spin_policy(0.0, SPINS, serves=False, crowded=False, busily=False)
    assert looks_of(look, seconds_each=spin.SPIN_SECONDS / 2) < SPINS


def test_while_rpc_runs_time_alone_ends_the_looks() -> None:
    count = looks_of(new_spin_policy(0.0, SPINS, serves=True, crowded=False, busily=False))
    assert count == pytest.approx(spin.RPC_SPIN_SECONDS / TICK, rel=0.01)


def test_a_look_that_is_interrupted_is_the_last_one() -> None:
    """Another thread wants the interpreter, or the core."""
    look = new_spin_policy(0.0, SPINS, serves=True, crowded=False, busily=False)
    assert look.goes_on(TICK, False)
    assert not look.goes_on(TICK + 2 * spin.INTERRUPTION_SECONDS, False)


@pytest.mark.parametrize("serves", [True, False])
def test_a_rank_without_a_core_of_its_own_counts_its_looks(serves: bool) -> None:
    """They may take any time: the other rank runs in between."""
    look = new_spin_policy(0.0, SPINS, serves=serves, crowded=True, busily=False)
    assert looks_of(look, seconds_each=1.0) == SPINS * (spin.RPC_SPIN_FACTOR if serves else 1)


def test_where_nobody_rings_looks_go_on_through_interruptions() -> None:
    look = new_spin_policy(0.0, SPINS, serves=True, crowded=False, busily=True)
    step = 2 * spin.INTERRUPTION_SECONDS
    assert looks_of(look, seconds_each=step, busily=True) == pytest.approx(spin.BUSY_POLL_SECONDS / step, abs=1.5)


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("crowded", [True, False])
def test_who_is_not_to_look_sleeps_at_once(serves: bool, crowded: bool) -> None:
    assert looks_of(new_spin_policy(0.0, 0, serves=serves, crowded=crowded, busily=False)) == 0

"""How often a thread that has nothing else to do checks for an event before it sleeps."""

import pytest

from hvlike.transport.loop import spin
from hvlike.transport.loop.spin import Spin, SpinPolicy

CHECKS = 10
MOMENT = 1e-6


def begun(*, serves: bool, crowded: bool, unnotified: bool, checks: int = CHECKS) -> Spin:
    """A wait that begins at time 0."""
    made = Spin(SpinPolicy(crowded=crowded))
    made.begin(0.0, checks, serves=serves, unnotified=unnotified)
    return made


def checks_of(wait: Spin, *, seconds_each: float = MOMENT, unnotified: bool = False, most: int = 100_000) -> int:
    """How many checks a wait makes, each of them so long."""
    now = 0.0
    for count in range(most):
        now += seconds_each
        if not wait.goes_on(now, unnotified=unnotified):
            return count
    return most


def test_without_rpc_a_few_checks_are_made() -> None:
    assert checks_of(begun(serves=False, crowded=False, unnotified=False)) == CHECKS


def test_slow_checks_without_rpc_end_by_time() -> None:
    wait = begun(serves=False, crowded=False, unnotified=False)
    assert checks_of(wait, seconds_each=spin.UNSHARED_SECONDS / 2) < CHECKS


def test_while_rpc_runs_time_alone_ends_the_checks() -> None:
    count = checks_of(begun(serves=True, crowded=False, unnotified=False))
    assert count == pytest.approx(spin.RPC_SECONDS / MOMENT, rel=0.01)


def test_an_interrupted_check_is_the_last_one() -> None:
    """Another thread wants the interpreter, or the core."""
    wait = begun(serves=True, crowded=False, unnotified=False)
    assert wait.goes_on(MOMENT, unnotified=False)
    assert not wait.goes_on(MOMENT + 2 * spin.INTERRUPTION_SECONDS, unnotified=False)


@pytest.mark.parametrize("serves", [True, False])
def test_a_rank_without_a_core_of_its_own_counts_its_checks(serves: bool) -> None:
    """They may take any time: the other rank runs in between."""
    wait = begun(serves=serves, crowded=True, unnotified=False)
    assert checks_of(wait, seconds_each=1.0) == CHECKS * (spin.RPC_CHECKS_FACTOR if serves else 1)


@pytest.mark.parametrize("crowded", [True, False])
def test_without_a_doorbell_checks_go_on_through_interruptions(crowded: bool) -> None:
    wait = begun(serves=True, crowded=crowded, unnotified=True)
    step = 2 * spin.INTERRUPTION_SECONDS
    expected = spin.UNNOTIFIED_SECONDS / step
    assert checks_of(wait, seconds_each=step, unnotified=True) == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("crowded", [True, False])
def test_a_thread_that_is_not_to_check_sleeps_at_once(serves: bool, crowded: bool) -> None:
    assert checks_of(begun(serves=serves, crowded=crowded, unnotified=False, checks=0)) == 0


def test_a_crowded_rank_checks_counters_once_and_the_board_never() -> None:
    crowded, alone = SpinPolicy(crowded=True), SpinPolicy(crowded=False)
    assert (crowded.counter_checks, crowded.board_checks) == (1, 0)
    assert (alone.counter_checks, alone.board_checks) == (spin.COUNTER_CHECKS, spin.BOARD_CHECKS)


def test_only_a_crowded_rank_that_sockets_wake_sleeps_at_once_for_another_node() -> None:
    crowded, alone = SpinPolicy(crowded=True), SpinPolicy(crowded=False)
    assert crowded.network_seconds == spin.UNNOTIFIED_SECONDS
    for policy in (crowded, alone):
        policy.hear_sockets(True)
    assert (crowded.network_seconds, alone.network_seconds) == (0.0, spin.UNNOTIFIED_SECONDS)
    wait = Spin(crowded)
    wait.begin(0.0, CHECKS, serves=False, unnotified=True)
    assert checks_of(wait, unnotified=True) == 0


def held_up(policy: SpinPolicy, *, seconds_each: float, checks: int, now: float = 0.0) -> None:
    wait = Spin(policy)
    wait.begin(now, CHECKS, serves=False, unnotified=True)
    for _ in range(checks):
        now += seconds_each
        wait.goes_on(now, unnotified=True)


def test_a_rank_whose_checks_are_held_up_is_crowded_for_a_while() -> None:
    """Another container, or any program, wants its core: no count of ranks tells it."""
    policy = SpinPolicy(crowded=False)
    held_up(policy, seconds_each=3e-3, checks=3)
    assert policy.crowded
    assert (policy.counter_checks, policy.queue_seconds) == (1, spin.CROWDED_QUEUE_SECONDS)
    held_up(policy, seconds_each=MOMENT, checks=10, now=1.0)
    assert policy.crowded
    held_up(policy, seconds_each=MOMENT, checks=10, now=2.0)
    assert not policy.crowded
    assert policy.counter_checks == spin.COUNTER_CHECKS


def test_the_wait_in_which_a_rank_finds_itself_held_up_goes_on_without_a_doorbell() -> None:
    """It gives its core away between checks; a rank that sleeps hears of a message of another node late."""
    policy = SpinPolicy(crowded=False)
    wait = Spin(policy)
    wait.begin(0.0, CHECKS, serves=False, unnotified=True)
    assert checks_of(wait, seconds_each=3e-3, unnotified=True) == pytest.approx(spin.UNNOTIFIED_SECONDS / 3e-3, abs=1.5)
    assert policy.crowded


def test_a_single_interruption_makes_no_rank_crowded() -> None:
    policy = SpinPolicy(crowded=False)
    for second in range(5):
        held_up(policy, seconds_each=3e-3, checks=1, now=second)
    assert not policy.crowded


def test_a_rank_without_a_core_of_its_own_stays_crowded() -> None:
    policy = SpinPolicy(crowded=True)
    held_up(policy, seconds_each=3e-3, checks=10)
    held_up(policy, seconds_each=MOMENT, checks=10, now=10.0)
    assert policy.crowded


def test_a_sleep_is_no_check_that_was_held_up() -> None:
    policy = SpinPolicy(crowded=False)
    checks = Spin(policy)
    checks.begin(0.0, 100, serves=False, unnotified=True)
    for number in range(1, 20):
        checks.slept()
        checks.goes_on(number * 0.25, unnotified=True)
    assert not policy.crowded

"""Which buckets start during backward."""

import pytest

from hvlike.collectives.requests.plan import Plan
from hvlike.training.gradients.early_starts import SLOW_STEPS, EarlyStarts, Mover, choose_mover
from hvlike.transport.host import topology


def plan_of(*buckets: tuple[int, ...], sparse: tuple[int, ...] = ()) -> Plan:
    return Plan(buckets, (None,) * sum(map(len, buckets)), sparse)


def following(plan: Plan, mover: Mover = Mover.LOOP, *, automatic: bool = False) -> EarlyStarts:
    early = EarlyStarts(mover, automatic=automatic, several_nodes=True)
    early.follow(plan)
    return early


def mark(early: EarlyStarts, index: int) -> list[int]:
    """The buckets that start when entry `index` is ready."""
    bucket = early.bucket_of(index)
    return [] if bucket is None else list(early.ready(bucket))


@pytest.mark.parametrize(
    ("wanted", "spare_core", "on_device", "mover"),
    [
        (None, True, False, Mover.LOOP),
        (None, False, False, Mover.NOTHING),
        (True, True, False, Mover.LOOP),
        (False, False, False, Mover.NOTHING),
        (None, False, True, Mover.DEVICE),
        (True, True, True, Mover.DEVICE),
        (False, False, True, Mover.NOTHING),
    ],
)
def test_a_device_needs_no_core_and_what_is_set_counts(
    wanted: bool | None, spare_core: bool, on_device: bool, mover: Mover
) -> None:
    assert choose_mover(wanted, spare_core=spare_core, on_device=on_device) is mover


def test_a_bucket_starts_when_it_and_all_before_it_are_complete() -> None:
    early = following(plan_of((3, 2), (1,), (0, 4)))
    assert [mark(early, index) for index in (1, 3, 0, 2)] == [[], [], [], [0, 1]]
    assert mark(early, 4) == [2]
    assert list(early.start_rest()) == []


def test_what_has_not_started_is_the_rest_and_a_new_step_starts_anew() -> None:
    early = following(plan_of((0,), (1,), (2,)))
    for _ in range(2):
        assert mark(early, 0) == [0]
        assert list(early.start_rest()) == [1, 2]
        early.expect_all()


def test_with_sparse_tensors_the_last_bucket_waits_for_the_end() -> None:
    early = following(plan_of((0,), (1,), sparse=(2,)))
    assert [mark(early, index) for index in (2, 0, 1)] == [[], [0], []]
    assert list(early.start_rest()) == [1]


def test_nothing_starts_without_a_plan_or_a_mover() -> None:
    early = following(plan_of((0,)))
    early.follow(None)
    assert early.bucket_of(0) is None
    assert list(early.start_rest()) == []
    assert following(plan_of((0,)), Mover.NOTHING).bucket_of(0) is None


@pytest.mark.parametrize("automatic", [True, False])
def test_a_core_that_is_not_spare_any_more_moves_nothing_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch, automatic: bool
) -> None:
    monkeypatch.setattr(topology, "runnable_threads", lambda: 1 << 20)
    early = following(plan_of((0,), (1,)), automatic=automatic)
    for _ in range(topology.FIRST_LOOKS + 1):
        mark(early, 0)
        early.expect_all()
    assert early.mover is (Mover.NOTHING if automatic else Mover.LOOP)


@pytest.mark.parametrize(
    ("slow", "mover"),
    [
        ([True] * SLOW_STEPS, Mover.HOOKS),
        ([True] * (SLOW_STEPS - 1) + [False, True], Mover.NOTHING),
    ],
)
def test_on_a_network_that_stays_slow_the_hooks_move_buckets(slow: list[bool], mover: Mover) -> None:
    early = following(plan_of((0,), (1,)), Mover.NOTHING, automatic=True)
    for each in slow:
        early.note_speed(slow=each)
    assert early.mover is mover


def test_one_bucket_or_what_the_user_has_set_is_not_moved_by_hooks() -> None:
    for early in (
        following(plan_of((0, 1)), Mover.NOTHING, automatic=True),
        following(plan_of((0,), (1,)), Mover.NOTHING),
    ):
        for _ in range(2 * SLOW_STEPS):
            early.note_speed(slow=True)
        assert early.mover is Mover.NOTHING

"""How far a rank is, when a set of waits is a deadlock and when only a delay, and which of them end: tables."""

import pytest

from hvlike.collectives.controller.positions import Positions
from hvlike.collectives.health.wait_for_graph import GROUP, STEP, WaitForGraph, WaitReport
from hvlike.collectives.requests.join_protocol import JoinFailure
from hvlike.collectives.requests.request import RequestKey, find_call_site
from hvlike.errors import DeadlockError, HorovodInternalError, JoinError

X, Y, Z = ("allreduce", "x"), ("allreduce", "y"), ("broadcast", "x")
MODEL = (STEP, "model")


def waiting(key: RequestKey, *, steps: int = 0, certain: bool = True, since: float = 0.0, **counts: int) -> WaitReport:
    return WaitReport(key, counts, {"model": steps}, certain, since)


def table(*waits: WaitReport | None) -> WaitForGraph:
    found = WaitForGraph(tuple(range(len(waits))))
    for position, each in enumerate(waits):
        if each is not None:
            found.report(position, each)
    return found


@pytest.mark.parametrize(
    ("waits", "missing", "deadlock"),
    [
        # Each waits for what the other has not asked for.
        ([waiting(X), waiting(Y)], {X: [1], Y: [0]}, True),
        # One does not wait: it computes.
        ([waiting(X), None], {X: [1]}, False),
        # All have asked for it: it is being carried out.
        ([waiting(X), waiting(X)], {}, False),
        # What rank 1 waits for has been decided: it will go on, and may ask for x.
        ([waiting(X), waiting(Y)], {X: [1]}, False),
        # What rank 1 waits for has been decided, and rank 0 asks for its next x.
        ([waiting(X), waiting(X)], {X: [1]}, False),
        # Three ranks, two of them together.
        ([waiting(X), waiting(X), waiting(Z)], {X: [2], Z: [0, 1]}, True),
        # Another thread of rank 1 may still ask for x.
        ([waiting(X), waiting(Y, certain=False)], {X: [1], Y: [0]}, False),
        # A planned step that the other rank has not begun, because it waits for x.
        ([waiting(MODEL, steps=4), waiting(X, steps=3)], {X: [0]}, True),
        # Rank 1 has begun the step: its data is on the way.
        ([waiting(MODEL, steps=4), waiting(X, steps=4)], {X: [0]}, False),
        ([waiting(MODEL, steps=4), waiting(MODEL, steps=4)], {}, False),
    ],
)
def test_deadlocked(waits: list[WaitReport | None], missing: dict[RequestKey, list[int]], deadlock: bool) -> None:
    assert table(*waits).deadlocked(lambda key: missing.get(key, [])) is deadlock


def test_members_that_have_joined_are_in_nobodys_way() -> None:
    found = table(waiting(X), waiting(Y), waiting(("join", "join")))
    missing = {X: [1], Y: [0], ("join", "join"): [0, 1]}
    assert found.deadlocked(lambda key: missing[key], joined=[2])
    assert not table(waiting(X), None, waiting(Z)).deadlocked(lambda key: [1], joined=[2])
    assert not table(waiting(X), waiting(X)).deadlocked(lambda key: [0], joined=[0, 1]), "nobody is left to deadlock"


def calling(group: str, number: int, *, certain: bool = True, **calls: int) -> WaitReport:
    """Waits for a call of a group. calls: made in each of the rank's groups."""
    made = {group: number, **calls}
    return WaitReport((GROUP, group), {}, {}, certain, calls=made, number=number, detail=f"call {number} of {group}")


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        # Each in a group in which the other has not come so far.
        ([calling("a", 3, b=6), calling("b", 7, a=2)], [0, 1]),
        # The other has made the call: its data is on the way.
        ([calling("a", 3, b=6), calling("b", 7, a=3)], None),
        # Rank 0 waits for an older call than its last.
        ([calling("a", 3, b=9), calling("b", 7, a=2)], None),
        # One does not wait; another thread of one may make the call.
        ([None, calling("b", 7, a=2)], None),
        ([calling("a", 3, b=6, certain=False), calling("b", 7, a=2)], None),
        # One is not in the other's group, or has left it.
        ([calling("a", 3, b=6), calling("b", 7)], None),
        # In a group and in an operation of hvlike: not seen by groups alone.
        ([calling("a", 3), WaitReport(X, {}, {}, True, calls={"a": 2})], None),
        # Three in a circle, and a fourth that waits for one of them.
        (
            [
                calling("a", 1, c=0, d=0),
                calling("b", 1, a=0),
                calling("c", 1, b=0),
                calling("d", 1),
            ],
            [0, 1, 2],
        ),
        # All in one group: its call is under way.
        ([calling("a", 3), calling("a", 3), calling("a", 3)], None),
        # One that computes is waited for by the others, in a row.
        ([calling("a", 3, b=6), calling("b", 7, c=0, a=3), None], None),
    ],
)
def test_crossed_groups(waits: list[WaitReport | None], circle: list[int] | None) -> None:
    """Whichever of them reports last."""
    found = table(*waits)
    for position in circle or range(len(waits)):
        if position in found.waits:
            crossed = found.crossed(position)
            assert (None if crossed is None else sorted(crossed.waits)) == circle


def test_crossed_groups_are_described() -> None:
    crossed = table(calling("a", 3, b=6), calling("b", 7, a=2), None).crossed(1)
    assert crossed is not None
    assert crossed.describe() == "rank 0 waits in call 3 of a, rank 1 waits in call 7 of b"
    assert "in the same order" in crossed.advice()
    assert crossed.waited_for() == [(GROUP, "b"), (GROUP, "a")]


def test_a_group_and_an_operation_are_a_deadlock_of_all() -> None:
    found = table(calling("a", 3), WaitReport(X, {}, {}, True, calls={"a": 2}))
    assert found.deadlocked({X: [0]}.__getitem__)
    assert found.advice().startswith("Every rank has to call the same operations")


def test_resumed_and_ended_waits_are_forgotten() -> None:
    found = table(waiting(X), waiting(Y), waiting(X))
    found.resume(1)
    found.resume(1)
    assert sorted(found.waits) == [0, 2]
    found.ended(X)
    assert found.waits == {}


def test_description() -> None:
    found = table(waiting(X, since=7.0), waiting(Z, since=5.0), None)
    assert found.describe() == "rank 0 waits in allreduce 'x', rank 1 waits in broadcast 'x'"
    assert found.waited_for() == [X, Z]


def test_counts_are_aligned_to_the_highest_of_each_kind() -> None:
    found = table(waiting(X, allreduce=3, barrier=1), waiting(Y, allreduce=5), waiting(Z, broadcast=2))
    assert found.aligned_counts() == {"allreduce": 5, "barrier": 1, "broadcast": 2}


PLAN = ("plan", "model")


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ([waiting(X), waiting(MODEL, steps=4)], ["different numbers of batches", "hvlike.join.Join", "hvd.join()"]),
        ([waiting(X), waiting(Y)], ["Every rank has to call the same operations"]),
        ([waiting(X), waiting(PLAN)], ["Every rank has to call the same operations"]),
        ([waiting(MODEL, steps=4), waiting(PLAN)], ["Rank 1 plans the reduction of gradients again"]),
        (
            [waiting(MODEL, steps=4), waiting(PLAN), waiting(PLAN)],
            ["Ranks 1, 2 plan the reduction of gradients again", "requires_grad"],
        ),
    ],
)
def test_the_advice_names_what_uneven_data_need_or_who_has_changed_what_is_reduced(
    waits: list[WaitReport], words: list[str]
) -> None:
    assert not [word for word in words if word not in table(*waits).advice()]


FAILURE = JoinFailure(JoinError("a member has left"), {"model": 3})


class Waits:
    """A rank that waits in some orders; what stops a wait is noted by its name and number."""

    def __init__(self) -> None:
        self.positions = Positions(lambda action: action())
        self.stopped: dict[tuple[str, int], HorovodInternalError] = {}

    def wait(self, name: str, number: int) -> None:
        stop = lambda error: self.stopped.setdefault((name, number), error)  # noqa: E731
        self.ended = self.positions.wait_begins(name, number, find_call_site(), ": 4 tensors", stop)


def test_a_member_that_has_left_ends_the_operations_that_it_has_not_begun() -> None:
    waits = Waits()
    waits.wait("model", 3)
    waits.wait("model", 4)
    waits.wait("other", 1)
    waits.positions.fail(FAILURE)
    assert waits.stopped == {("model", 4): FAILURE.error, ("other", 1): FAILURE.error}


def test_so_do_those_that_begin_later_until_it_takes_part_again() -> None:
    waits = Waits()
    waits.positions.fail(FAILURE)
    waits.wait("model", 3)
    waits.wait("model", 5)
    assert list(waits.stopped) == [("model", 5)]
    waits.positions.fail(None)
    waits.wait("model", 6)
    assert list(waits.stopped) == [("model", 5)]


def test_a_deadlock_ends_the_waits_in_its_order_alone() -> None:
    waits = Waits()
    waits.wait("model", 3)
    waits.wait("other", 3)
    waits.positions.stop(("allreduce", "model"), DeadlockError("of others"))
    assert not waits.stopped
    waits.positions.stop(("step", "model"), DeadlockError("of this one"))
    assert list(waits.stopped) == [("model", 3)]


def test_a_wait_that_is_over_is_neither_stopped_nor_shown() -> None:
    waits = Waits()
    waits.wait("model", 3)
    waits.ended()
    waits.wait("other", 1)
    ((key, shown),) = waits.positions.submissions(0.0)
    assert key == ("step", "other")
    assert shown.detail == ": 4 tensors"
    assert "test_waits.py" in shown.place
    waits.positions.close(HorovodInternalError("the end"))
    assert list(waits.stopped) == [("other", 1)]


class Groups:
    """The groups of torch.distributed of a rank."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def made(self) -> dict[str, int]:
        return {"a": 3}

    def may_go_on(self) -> bool:
        return False

    def stop(self, name: str, error: HorovodInternalError) -> None:
        self.stopped.append(name)


def test_a_deadlock_in_a_group_ends_the_group_and_no_step_of_its_name() -> None:
    waits, groups = Waits(), Groups()
    waits.wait("a", 1)
    error = DeadlockError("no rank can go on")
    waits.positions.stop((GROUP, "a"), error)
    waits.positions.calls = groups
    waits.positions.stop((GROUP, "a"), error)
    waits.positions.stop((STEP, "b"), error)
    assert groups.stopped == ["a"]
    assert waits.stopped == {}

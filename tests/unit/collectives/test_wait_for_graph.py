"""When a set of waits is a deadlock and when only a delay: a table, no messages."""

import pytest

from hvlike.collectives.health.wait_for_graph import GROUP, STEP, WaitForGraph, WaitReport
from hvlike.collectives.requests.request import RequestKey

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


def test_the_advice_names_what_uneven_data_need() -> None:
    advice = table(waiting(X), waiting(MODEL, steps=4)).advice()
    assert "different numbers of batches" in advice
    assert "hvlike.join.Join" in advice
    assert "hvd.join()" in advice


def test_the_advice_names_who_has_changed_what_is_reduced() -> None:
    plan = ("plan", "model")
    assert table(waiting(X), waiting(Y)).advice().startswith("Every rank has to call the same operations")
    assert table(waiting(X), waiting(plan)).advice().startswith("Every rank has to call the same operations")
    assert (
        table(waiting(MODEL, steps=4), waiting(plan))
        .advice()
        .startswith("Rank 1 plans the reduction of gradients again")
    )
    several = table(waiting(MODEL, steps=4), waiting(plan), waiting(plan)).advice()
    assert several.startswith("Ranks 1, 2 plan the reduction of gradients again")
    assert "requires_grad" in several

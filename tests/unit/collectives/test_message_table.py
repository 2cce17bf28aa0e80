"""What the coordinator concludes from what ranks ask for, by way of leaders of nodes, and when ranks join: tables."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.requests.join_protocol import (
    LEAVE_KEY,
    JoinFailure,
    JoinRequest,
    JoinScope,
    LeaveEnd,
    LeaveRequest,
    neutral_tensors,
)
from hvlike.collectives.requests.message_table import (
    Entry,
    MessageTable,
    NodeTable,
    ReadyList,
    find_mismatch,
    name_ranks,
    summarise,
    tree_of,
)
from hvlike.collectives.requests.plan import QueueProposal
from hvlike.collectives.requests.request import RequestSpec
from hvlike.errors import HorovodInternalError, MismatchError, ShapeMismatchError

RANKS = (0, 3, 5)
GRAD = RequestSpec("allreduce", ("float32",), ((2, 3),), op=1, strides=(None,))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        (range(16), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"),
        (range(64), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ... (64 in all)"),
    ],
)
def test_name_ranks(ranks: Any, text: str) -> None:
    assert name_ranks(ranks) == text


def test_the_last_member_brings_the_verdict() -> None:
    table = MessageTable(RANKS)
    key = ("allreduce", "grad")
    assert table.submit(2, key, GRAD) is None
    assert table.missing(key) == [0, 3]
    assert table.submit(0, key, GRAD) is None
    assert table.missing(key) == [3]
    response = table.submit(1, key, GRAD)
    assert response is not None
    assert (response.key, response.spec, response.error, response.uniform) == (key, GRAD, None, True)
    assert table.pending == {}
    assert table.submit(0, key, GRAD) is None, "the name is free again"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"device": "cuda"},
            MismatchError,
            "device selection for 'g': ranks 0, 3 passed CPU, rank 5 passed CUDA.",
        ),
        ({"postscale": 2.0}, MismatchError, "ranks 0, 3 passed (1.0, 1.0), rank 5 passed (1.0, 2.0)."),
        ({"shapes": ((3, 2),)}, ShapeMismatchError, "shapes for 'g': ranks 0, 3 passed [2, 3], rank 5 passed [3, 2]."),
    ],
    ids=["device", "postscale", "shape"],
)
def test_what_must_be_equal(change: dict[str, Any], error: type[MismatchError], text: str) -> None:
    found = find_mismatch("g", RANKS, [GRAD, GRAD, GRAD._replace(**change)])
    assert type(found) is error
    assert str(found).startswith("Mismatched ALLREDUCE ")
    assert text in str(found)


def test_strides_may_differ_and_then_rows_are_the_order() -> None:
    turned = GRAD._replace(strides=((1, 2),))
    assert find_mismatch("g", RANKS, [GRAD, turned, GRAD]) is None
    assert summarise([GRAD, GRAD, GRAD]) == (True,)
    assert summarise([turned, turned, turned]) == (True,)
    assert summarise([GRAD, turned, GRAD]) == (False,)


def test_rows_of_an_allgather_may_differ() -> None:
    signatures = [RequestSpec("allgather", ("int8",), (shape,), strides=(None,)) for shape in ((4, 2), (0, 2), (1, 2))]
    assert find_mismatch("rows", RANKS, signatures) is None
    assert summarise(signatures) == ((4,), (0,), (1,))
    scalars = [RequestSpec("allgather", ("int8",), ((),), strides=(None,))] * 3
    assert summarise(scalars) == ((1,), (1,), (1,))
    wrong = [*signatures[:2], signatures[2]._replace(shapes=((1, 3),))]
    found = find_mismatch("rows", RANKS, wrong)
    assert type(found) is ShapeMismatchError
    assert "ranks 0, 3 passed [2] after the first dimension, rank 5 passed [3] after" in str(found)


KINDS = ["allreduce", "broadcast", "allgather"]
JOIN: Entry = ("join", RequestSpec("join"))
A: Entry = ("a", 0)
B: Entry = ("b", 0)
C: Entry = ("c", 1)


def node(size: int = 2) -> NodeTable:
    return NodeTable(size, KINDS.__getitem__)


def asks(table: NodeTable, position: int, *entries: Entry) -> ReadyList:
    return table.collect([((position,), list(entries))])


def test_what_all_have_asked_for_goes_on_at_once_as_one_entry() -> None:
    table = node(3)
    assert asks(table, 3, A, B) == []
    assert asks(table, 4, B, A) == []
    assert asks(table, 5, A) == [((3, 4, 5), [A])]
    assert asks(table, 5, B) == [((3, 4, 5), [B])]
    assert table.take() == []


def test_what_some_have_asked_for_is_told_later_and_the_rest_when_the_last_asks() -> None:
    table = node(4)
    asks(table, 0, A)
    asks(table, 1, A, B)
    assert table.take() == [((0, 1), [A]), ((1,), [B])]
    assert table.take() == [], "each is told once"
    assert asks(table, 2, A) == []
    assert asks(table, 3, A) == [((2, 3), [A])]


def test_after_the_answer_a_name_begins_anew() -> None:
    table = node()
    asks(table, 0, A)
    table.take()
    asks(table, 1, A)
    table.decided(("allreduce", "a"))
    assert asks(table, 1, A) == []
    assert asks(table, 0, A) == [((1, 0), [A])]


@pytest.mark.parametrize(
    ("nodes", "parents", "children"),
    [
        ([(0, 1, 2)], [0, 0, 0], [[1, 2], [], []]),
        ([(0,), (1,), (2,)], [0, 0, 0], [[1, 2], [], []]),
        ([(0, 1), (2, 3), (4,)], [0, 0, 0, 2, 0], [[2, 4, 1], [], [3], [], []]),
        # The coordinator's node need not be the first one.
        ([(1, 3), (0, 2)], [0, 0, 0, 1], [[1, 2], [3], [], []]),
    ],
    ids=["one node", "one rank a node", "several of both", "another order"],
)
def test_every_member_speaks_through_the_first_of_its_node(
    nodes: Sequence[Sequence[int]], parents: list[int], children: list[list[int]]
) -> None:
    tree = [tree_of(nodes, position) for position in range(len(parents))]
    assert [parent for parent, _ in tree] == parents
    assert [list(below) for _, below in tree] == children


PAIR = RequestSpec("allreduce", ("float32",), ((2,),), op=1, strides=(None,))
X = ("allreduce", "x")


def joins(plans: tuple[int, ...] = (), spare: tuple[int, ...] = (), **counts: int) -> RequestSpec:
    return RequestSpec("join", detail=JoinRequest(counts, frozenset(plans), frozenset(spare)))


def test_what_cannot_do_without_a_rank_fails_once_all_active_ranks_have_asked() -> None:
    table = MessageTable((4, 5, 6))
    table.join(0, joins())
    gather = RequestSpec("allgather", ("float32",), ((2,),), strides=(None,))
    assert table.submit(1, ("allgather", "y"), gather) is None
    response = table.submit(2, ("allgather", "y"), gather)
    assert response is not None
    assert "allgather 'y' cannot run: rank 4 called hvd.join()" in str(response.error)


def test_the_end_names_the_last_rank_and_aligns_the_counts() -> None:
    table = MessageTable((4, 5, 6))
    assert table.join(1, joins((1, 2), (7, 8), allreduce=3)) == []
    assert table.join(2, joins((1, 2, 3), (8,), barrier=1)) == []
    (response,) = table.join(0, joins((2, 3), (8, 9), allreduce=5))
    end = response.extra
    assert end.last == 4
    assert end.counts == {"allreduce": 5, "barrier": 1}
    assert end.plans == {2}
    assert end.spare_queues == {8}
    assert list(table.joined) == []
    assert table.pending == {}


def test_plans_made_after_a_rank_has_joined_are_its_own_too() -> None:
    table = MessageTable((0, 1))
    table.join(0, joins((1,)))
    table.joins.planned(2)
    (response,) = table.join(1, joins((2,)))
    assert response.extra.plans == {2}


def test_a_queue_is_taken_while_ranks_have_joined_only_if_it_is_spare_on_them_and_once() -> None:
    table = MessageTable((0, 1, 2))
    table.join(0, joins(spare=(3, 4)))
    table.join(1, joins(spare=(4,)))
    assert table.joins.take_queue(3) == -1
    assert table.joins.take_queue(4) == 4
    assert table.joins.take_queue(4) == -1
    assert MessageTable((0, 1)).joins.take_queue(5) == 5, "nobody has joined: the others have agreed"


def leave(spare: tuple[int, ...] = (), *, failed: bool = False, **counts: int) -> RequestSpec:
    return RequestSpec("join", detail=LeaveRequest(counts, frozenset(spare), failed))


def test_who_stands_in_for_plans_alone_asks_for_all_else() -> None:
    table = MessageTable((0, 1))
    request = JoinRequest({}, frozenset(), scope=JoinScope.PLANS, names=frozenset({"known"}))
    table.join(0, RequestSpec("join", detail=request))
    assert list(table.joined) == []
    assert list(table.away) == [0]
    assert table.submit(1, X, PAIR) is None
    assert table.missing(X) == [0]
    response = table.submit(0, X, PAIR)
    assert response is not None
    assert response.error is None


def test_a_queue_is_agreed_without_a_rank_that_knows_it() -> None:
    table = MessageTable((0, 1))
    table.join(0, RequestSpec("join", detail=JoinRequest({}, frozenset(), names=frozenset({"known"}))))
    queue = RequestSpec("queue", detail=QueueProposal((("length", "3"),), ""))
    known = table.submit(1, ("queue", "known"), queue)
    assert known is not None
    assert (known.error, known.extra.serial) == (None, 1)
    unknown = table.submit(1, ("queue", "unknown"), queue)
    assert unknown is not None
    assert "has to be made on all ranks" in str(unknown.error)


def test_ranks_that_join_in_different_ways_are_told() -> None:
    table = MessageTable((4, 5))
    table.join(0, joins())
    other = JoinRequest({}, frozenset(), how="left its Join context of Counter")
    (response,) = table.join(1, RequestSpec("join", detail=other))
    assert str(response.error) == (
        "Mismatched join: rank 4 called hvd.join(), rank 5 left its Join context of Counter. Join in the same way on "
        "every rank, with the same joinables."
    )


def test_all_leave_together() -> None:
    table = MessageTable((0, 1, 2))
    assert table.submit(1, LEAVE_KEY, leave((1, 2), allreduce=3)) is None
    assert table.submit(0, LEAVE_KEY, leave((2, 3), failed=True)) is None
    response = table.submit(2, LEAVE_KEY, leave((2,), allreduce=1, barrier=1))
    assert response is not None
    assert response.extra == LeaveEnd({"allreduce": 3, "barrier": 1}, frozenset({2}), failed=True)


def test_steps_that_a_failed_rank_has_taken_part_in_can_be_completed() -> None:
    failure = JoinFailure(HorovodInternalError("gone"), {"a": 3})
    assert [failure.misses("a", step) for step in (2, 3, 4)] == [False, False, True]
    assert failure.misses("b", 1)


def test_neutral_tensors() -> None:
    def neutral(op: ReduceOp, dtype: str, prescale: float = 1.0) -> object:
        (tensor,) = neutral_tensors(
            RequestSpec("allreduce", (dtype,), ((1,),), op=op, prescale=prescale, strides=(None,))
        )
        assert tensor.dtype is getattr(torch, dtype)
        return tensor.item()

    assert neutral(ReduceOp.SUM, "int8") == 0
    assert neutral(ReduceOp.ADASUM, "float16") == 0
    assert neutral(ReduceOp.MIN, "int8") == 127
    assert neutral(ReduceOp.MAX, "float32") == float("-inf")
    assert neutral(ReduceOp.MAX, "float32", -1.0) == float("inf"), "the factor turns the order round"
    assert neutral(ReduceOp.MIN, "float32", 0.0) == 0, "0 times infinity is no number"
    assert neutral(ReduceOp.PRODUCT, "bool") is True

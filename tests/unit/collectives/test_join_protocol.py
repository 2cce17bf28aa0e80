"""What the coordinator concludes when ranks join: tables, no messages."""

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.requests.join_protocol import (
    JOIN_KEY,
    LEAVE_KEY,
    JoinFailure,
    JoinRequest,
    JoinScope,
    LeaveEnd,
    LeaveRequest,
    neutral_tensors,
)
from hvlike.collectives.requests.message_table import MessageTable
from hvlike.collectives.requests.plan import QueueProposal
from hvlike.collectives.requests.request import RequestSpec
from hvlike.errors import HorovodInternalError

GRAD = RequestSpec("allreduce", ("float32",), ((2,),), op=1, strides=(None,))
X = ("allreduce", "x")


def joins(plans: tuple[int, ...] = (), spare: tuple[int, ...] = (), **counts: int) -> RequestSpec:
    return RequestSpec("join", detail=JoinRequest(counts, frozenset(plans), frozenset(spare)))


def test_a_request_that_lacked_only_the_rank_that_joins_is_decided() -> None:
    table = MessageTable((0, 1, 2))
    assert table.submit(0, X, GRAD) is None
    assert table.submit(2, X, GRAD) is None
    assert table.missing(X) == [1]
    (response,) = table.join(1, joins())
    assert (response.key, response.error) == (X, None)
    assert list(table.joined) == [1]
    assert table.missing(JOIN_KEY) == [0, 2]


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
    assert table.submit(1, X, GRAD) is None
    assert table.missing(X) == [0]
    response = table.submit(0, X, GRAD)
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

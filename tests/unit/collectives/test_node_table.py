"""What a node leader tells the coordinator, and when: what all of its node have asked for at once, the rest later."""

from collections.abc import Sequence

import pytest

from hvlike.collectives.requests.join_protocol import JOIN_KEY
from hvlike.collectives.requests.message_table import Entry, NodeTable, ReadyList, tree_of
from hvlike.collectives.requests.request import RequestSpec

KINDS = ["allreduce", "broadcast", "allgather"]
GRAD = RequestSpec("allreduce", ("float32",), ((2, 3),), op=1, strides=(None,))
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


def test_entries_of_the_same_members_are_one_list() -> None:
    table = node()
    asks(table, 0, A, B, C)
    assert asks(table, 1, C, B, A) == [((0, 1), [C, B, A])]


def test_a_name_serves_two_kinds_at_the_same_time() -> None:
    table = node()
    assert asks(table, 0, ("x", 0), ("x", 1)) == []
    assert asks(table, 1, ("x", 1)) == [((0, 1), [("x", 1)])]
    assert asks(table, 1, ("x", 0)) == [((0, 1), [("x", 0)])]


def test_specs_without_a_number_are_gathered_too_also_where_they_differ() -> None:
    table, other = node(), GRAD._replace(shapes=((4, 3),))
    asks(table, 0, ("same", GRAD), ("mismatch", GRAD), ("one knows the number", 0))
    assert asks(table, 1, ("same", GRAD), ("mismatch", other), ("one knows the number", GRAD)) == [
        ((0, 1), [("same", GRAD)]),
        ((0,), [("mismatch", GRAD)]),
        ((1,), [("mismatch", other)]),
        ((0,), [("one knows the number", 0)]),
        ((1,), [("one knows the number", GRAD)]),
    ]


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


def test_what_failed_before_all_have_asked_is_told_no_more() -> None:
    table = node()
    asks(table, 0, A, B)
    table.decided(("allreduce", "a"))
    assert table.take() == [((0,), [B])]


def test_while_everything_is_recorded_nothing_waits() -> None:
    assert node().collect([((1,), [A, B])], at_once=True) == [((1,), [A, B])]


def test_a_member_that_joins_is_told_after_what_it_has_asked_for_and_nothing_waits_for_it() -> None:
    table = node(3)
    asks(table, 0, A)
    assert asks(table, 2, B, JOIN) == [((0,), [A]), ((2,), [B, JOIN])]
    assert asks(table, 0, B) == [((0,), [B])]
    assert asks(table, 1, A, B, JOIN) == [((1,), [A, B, JOIN])]
    table.decided(("allreduce", "a"))
    table.decided(("allreduce", "b"))
    assert asks(table, 0, C, JOIN) == [((0,), [C, JOIN])]
    table.decided(JOIN_KEY)
    assert asks(table, 1, A) == [], "all are back"


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

"""What the coordinator concludes from the ranks' signatures: a table, no messages."""

from typing import Any

import pytest

from hvlike.collectives.requests.message_table import MessageTable, find_mismatch, name_ranks, summarise
from hvlike.collectives.requests.request import RequestSpec
from hvlike.errors import MismatchError, ShapeMismatchError

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


def test_a_withdrawn_request_starts_anew() -> None:
    table = MessageTable(RANKS)
    key = ("barrier", "noname.0")
    table.submit(0, key, RequestSpec("barrier"))
    table.withdraw(key)
    table.withdraw(key)
    assert table.missing(key) == list(RANKS)


def test_requests_of_several_names_do_not_touch() -> None:
    table = MessageTable((0, 1))
    table.submit(0, ("allreduce", "a"), GRAD)
    table.submit(1, ("allreduce", "b"), GRAD)
    table.submit(1, ("broadcast", "a"), GRAD._replace(kind="broadcast"))
    assert len(table.pending) == 3
    assert table.submit(1, ("allreduce", "a"), GRAD) is not None


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"shapes": ((3, 2),)},
            ShapeMismatchError,
            "shapes for 'g': ranks 0, 3 passed [2, 3], rank 5 passed [3, 2].",
        ),
        ({"dtypes": ("int8",)}, MismatchError, "data types for 'g': ranks 0, 3 passed float32, rank 5 passed int8."),
        (
            {"device": "cuda"},
            MismatchError,
            "device selection for 'g': ranks 0, 3 passed CPU, rank 5 passed CUDA.",
        ),
        ({"op": 3}, MismatchError, "reduction operation for 'g': ranks 0, 3 passed Sum, rank 5 passed Min."),
        ({"prescale": 0.5}, MismatchError, "factors for 'g': ranks 0, 3 passed (1.0, 1.0), rank 5 passed (0.5, 1.0)."),
        ({"postscale": 2.0}, MismatchError, "ranks 0, 3 passed (1.0, 1.0), rank 5 passed (1.0, 2.0)."),
        ({"root": 3}, MismatchError, "root ranks for 'g': ranks 0, 3 passed root -1, rank 5 passed root 3."),
        (
            {"shapes": ((2, 3), (1,)), "dtypes": ("float32", "int8"), "strides": (None, None)},
            MismatchError,
            "group lengths for 'g': ranks 0, 3 passed 1 tensors, rank 5 passed 2 tensors.",
        ),
    ],
    ids=["shape", "dtype", "device", "op", "prescale", "postscale", "root", "length"],
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

"""Which operations run as one: neighbours of one kind, up to a limit, groups apart where that is wanted."""

import pytest
import torch

from hvlike.collectives.controller.execution import fuse
from hvlike.collectives.controller.operations import Agreed
from hvlike.collectives.requests.message_table import Response
from hvlike.collectives.requests.request import Request, spec_of_tensors


def ask(name: str, *lengths: int, kind: str = "allreduce", op: int = 1) -> Agreed:
    """An operation on tensors of so many bytes."""
    tensors = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    request = Request(name, spec_of_tensors(kind, tensors, op=op), tensors, lambda request: None)
    return request, Response(request.key, request.spec)


def names(batches: list[list[Agreed]]) -> list[str]:
    return ["".join(request.name for request, _ in batch) for batch in batches]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(100, ["abcd"]), (30, ["abc", "d"]), (20, ["ab", "cd"]), (10, ["a", "b", "c", "d"]), (0, ["a", "b", "c", "d"])],
)
def test_neighbours_are_joined_up_to_the_limit(limit: int, expected: list[str]) -> None:
    assert names(fuse([ask(name, 10) for name in "abcd"], limit)) == expected


def test_other_kinds_and_ops_are_never_joined() -> None:
    agreed = [ask("a", 1), ask("b", 1, kind="broadcast"), ask("c", 1, kind="broadcast"), ask("d", 1), ask("e", 1, op=3)]
    assert names(fuse(agreed, 100)) == ["a", "bc", "d", "e"]


def test_a_large_operation_runs_alone() -> None:
    assert names(fuse([ask("a", 1), ask("b", 500), ask("c", 1)], 100)) == ["a", "b", "c"]


def test_groups_can_be_kept_apart() -> None:
    agreed = [ask("a", 1), ask("b", 1, 1), ask("c", 1, 1), ask("d", 1), ask("e", 1)]
    assert names(fuse(agreed, 100)) == ["abcde"]
    assert names(fuse(agreed, 100, whole_groups=True)) == ["a", "b", "c", "de"]

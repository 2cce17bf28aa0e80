"""Which tensors are reduced where they lie, and how often that is prepared."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.base import SoloBackend
from hvlike.collectives.requests.collective_jobs import MOST_PREPARED, PlainAllreduces, is_plain
from hvlike.collectives.requests.reduction import Adasum, Average, ScaledOp, Sum

SUM = ScaledOp(Sum, 1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: torch.ones(3, 4), True),
        (lambda: torch.nn.Parameter(torch.ones(3)), True),
        (lambda: torch.ones(3, requires_grad=True), True),
        (lambda: torch.ones(4, 3)[1:3], True),
        (lambda: torch.ones(3, 4).t(), False),
        (lambda: torch.ones(6)[::2], False),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), False),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, False),
        (lambda: torch.ones(3, device="meta"), False),
    ],
)
def test_plain_is_what_lies_row_by_row_in_host_memory(make: Callable[[], torch.Tensor], plain: bool) -> None:
    assert is_plain(make()) is plain


def test_tensors_of_inference_mode_are_plain() -> None:
    with torch.inference_mode():
        assert is_plain(torch.ones(3))


class Preparing(SoloBackend):
    """Notes what it has prepared."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> Any:
        self.lengths += lengths
        return self


def allreduces() -> tuple[PlainAllreduces, Preparing]:
    backend = Preparing()
    queue: Any = SimpleNamespace(backend=backend, group=SimpleNamespace(size=2))
    return PlainAllreduces(queue), backend


def test_each_kind_is_checked_and_prepared_once() -> None:
    plain, backend = allreduces()
    checks: list[int] = []
    for length in (5, 5, 7, 5):
        assert plain.job(torch.ones(length), SUM, lambda length=length: checks.append(length)) is not None
    assert checks == backend.lengths == [5, 7]


def test_what_a_check_refuses_is_asked_again() -> None:
    plain, backend = allreduces()

    def refuse() -> None:
        raise KeyError("refused")

    for _ in range(2):
        with pytest.raises(KeyError, match="refused"):
            plain.job(torch.ones(5), SUM, refuse)
    assert not backend.lengths


@pytest.mark.parametrize(
    ("tensor", "reduction"),
    [
        (torch.ones(0), SUM),
        (torch.ones(3), ScaledOp(Adasum, 1.0, 1.0)),
        (torch.ones(3, dtype=torch.int8), ScaledOp(Average, 1.0, 1.0)),
        (torch.ones(4, 3).t(), SUM),
    ],
)
def test_what_goes_through_a_copy_has_no_job_here(tensor: torch.Tensor, reduction: ScaledOp) -> None:
    plain, backend = allreduces()
    assert plain.job(tensor, reduction) is None
    assert not backend.lengths


def test_few_kinds_are_kept() -> None:
    plain, backend = allreduces()
    for length in range(1, MOST_PREPARED + 2):
        plain.job(torch.ones(length), SUM)
    plain.job(torch.ones(1), SUM)
    assert len(backend.lengths) == MOST_PREPARED + 2

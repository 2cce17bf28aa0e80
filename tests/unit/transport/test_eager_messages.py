"""How long a message may be that MPI sends over TCP without asking the receiver. No MPI."""

from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.transport.host.mpi_library import EAGER_LIMIT, eager_bytes

OPEN_MPI: Any = SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, package: Open MPI\0")
MPICH: Any = SimpleNamespace(Get_library_version=lambda: "MPICH Version: 4.3.2\nMPICH Release date: 2025\n")


@pytest.mark.parametrize(
    ("setting", "limit"),
    [({EAGER_LIMIT: "262144"}, 256 << 10), ({}, 64 << 10), ({EAGER_LIMIT: "256k"}, 64 << 10)],
    ids=["as set", "what Open MPI takes", "what Open MPI does not read"],
)
def test_open_mpi_counts_its_headers(setting: dict[str, str], limit: int) -> None:
    assert limit - (8 << 10) < eager_bytes(OPEN_MPI, setting) < limit


@pytest.mark.parametrize(
    ("setting", "expected"), [("1024", 0), ("0", 0), (str(1 << 30), eager_bytes(OPEN_MPI, {EAGER_LIMIT: "262144"}))]
)
def test_limits_far_from_these_do_not_rule(setting: str, expected: int) -> None:
    assert eager_bytes(OPEN_MPI, {EAGER_LIMIT: setting}) == expected


def test_of_another_library_it_is_not_known() -> None:
    assert eager_bytes(MPICH, {EAGER_LIMIT: "262144"}) == 0

"""A process forked from a rank is refused; the rank itself and its other work are not."""

import os
import sys

import pytest
from support.children import raised_in_child

from hvlike.errors import ForkedProcessError
from hvlike.transport.host import mpi_library
from hvlike.transport.world import World


def test_the_rank_itself_passes() -> None:
    mpi_library.load_mpi()
    assert not mpi_library.ForkMark.forked
    mpi_library.check_not_forked()


def test_a_forked_child_is_refused() -> None:
    mpi_library.load_mpi()
    said = raised_in_child(mpi_library.check_not_forked)
    assert said.startswith(ForkedProcessError.__name__)
    assert str(os.getpid()) in said
    mpi_library.check_not_forked()


def test_a_forked_child_cannot_start_a_world() -> None:
    mpi_library.load_mpi()
    assert raised_in_child(World.start).startswith(ForkedProcessError.__name__)


def test_a_grandchild_is_refused_too() -> None:
    mpi_library.load_mpi()

    def refuse_grandchild() -> None:
        raise RuntimeError(raised_in_child(mpi_library.check_not_forked))

    assert "ForkedProcessError" in raised_in_child(refuse_grandchild)


def test_a_child_forked_before_mpi_started_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert raised_in_child(mpi_library.check_not_forked) == ""

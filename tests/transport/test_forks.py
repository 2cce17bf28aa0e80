"""A process forked from a rank is refused; the rank itself and its other work are not."""

import os
import sys

import pytest
from children import raised_in_child

from hvlike.errors import ForkedProcessError
from hvlike.transport import forks
from hvlike.transport import mpi as mpi_library
from hvlike.transport.world import World


def test_the_rank_itself_passes() -> None:
    mpi_library.load()
    assert not forks.is_forked()
    forks.check()


def test_a_forked_child_is_refused() -> None:
    mpi_library.load()
    said = raised_in_child(forks.check)
    assert said.startswith(ForkedProcessError.__name__)
    assert str(os.getpid()) in said
    forks.check()


def test_a_forked_child_cannot_start_a_world() -> None:
    mpi_library.load()
    assert raised_in_child(World.start).startswith(ForkedProcessError.__name__)


def test_a_grandchild_is_refused_too() -> None:
    mpi_library.load()

    def refuse_grandchild() -> None:
        raise RuntimeError(raised_in_child(forks.check))

    assert "ForkedProcessError" in raised_in_child(refuse_grandchild)


def test_a_child_forked_before_mpi_started_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert raised_in_child(forks.check) == ""

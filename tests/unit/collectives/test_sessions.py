"""A session: the line that the log has at its start, and what a ProcessSet may be made of."""

from types import SimpleNamespace
from typing import Any

import pytest

from hvlike import ProcessSet
from hvlike.collectives.session.job_settings import start_line
from hvlike.transport.host.launchers import Launcher

MPIRUN = Launcher("mpirun", 1, "X")
ALONE = "1 rank on 1 node (h); for several, start the program with mpirun -n N python ..."


@pytest.mark.parametrize(
    ("nodes", "launcher", "line"),
    [
        (((0,),), None, ALONE),
        (((0,),), MPIRUN, "1 rank on 1 node (h)"),
        (((0, 1),), MPIRUN, "2 ranks on 1 node (h): shared memory"),
        (((0,), (1,)), MPIRUN, "2 ranks on 2 nodes: MPI between nodes"),
        (((0, 1), (2,)), MPIRUN, "3 ranks on 2 nodes: shared memory inside of a node, MPI between nodes"),
    ],
)
def test_it_says_ranks_nodes_and_way(nodes: tuple[tuple[int, ...], ...], launcher: Launcher | None, line: str) -> None:
    world: Any = SimpleNamespace(nodes=nodes, size=sum(map(len, nodes)), host="h")
    assert start_line(world, launcher) == line


def test_ranks_are_sorted() -> None:
    assert ProcessSet([3, 0, 2]).ranks == [0, 2, 3]
    assert ProcessSet(range(2)).ranks == [0, 1]


def test_an_unregistered_set_knows_nothing() -> None:
    unregistered = ProcessSet([0, 1])
    assert unregistered.process_set_id is None
    assert unregistered.size() is None
    assert unregistered.rank() is None
    assert unregistered.included() is None
    assert str(unregistered) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"


@pytest.mark.parametrize("what", ["01", 3, [0.5], None, [], [0, 0], [-1]], ids=repr)
def test_anything_else_is_refused(what: object) -> None:
    with pytest.raises(ValueError, match="ProcessSet should be initialized with a list of process ranks or an mpi4py"):
        ProcessSet(what)

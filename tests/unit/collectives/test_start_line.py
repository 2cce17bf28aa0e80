"""The line that the log has at the start."""

from types import SimpleNamespace
from typing import Any

import pytest

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

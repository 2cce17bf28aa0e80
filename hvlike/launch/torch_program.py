"""python -m hvlike run [-m MODULE | SCRIPT] ...: run a program of torch.distributed as a rank, without torchrun.

MPI numbers the ranks, and agrees on an address and a port; the program finds them in the variables that torchrun sets.
"""

from __future__ import annotations

import os
import sys

from hvlike.config import read_config
from hvlike.errors import HvlikeError, UsageError
from hvlike.transport.host import rank_variables
from hvlike.transport.host.main_program import find_program, run_program
from hvlike.transport.world import World

_USAGE = """usage: mpirun -n 4 python -m hvlike run [-m MODULE | SCRIPT] [ARGUMENT ...]

Runs a program of torch.distributed on this rank, with any backend (hvlike, gloo, nccl), under mpirun, srun, or another
launcher of MPI jobs. Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK by MPI, and where they are not
set MASTER_ADDR and MASTER_PORT, as torchrun does. MPI starts before the program imports torch. A rank that fails ends
the job."""


def main(arguments: list[str]) -> int:
    """Run the program; returns its exit status."""
    is_asked = arguments[:1] in (["-h"], ["--help"])
    if is_asked or not arguments:
        print(_USAGE, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    try:
        program = find_program(arguments)
        set_variables()
    except HvlikeError as error:
        print(f"python -m hvlike run: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return run_program(program)


def set_variables() -> None:
    """Start MPI and set the variables of this rank. Collective: every rank of the job calls it. Blocks until all have.

    Raises: LaunchError, UsageError, as init().
    """
    knobs = read_config(os.environ)
    world = World.start(
        ranks_per_node=knobs.ranks_per_node,
        patience=knobs.stall_check_seconds,
        limit=knobs.stall_shutdown_seconds,
        serialized=knobs.mpi_threads_disable,
    )
    rank_variables.set_missing(os.environ, rank_variables.places(world), anew=True)
    rank_variables.set_missing(os.environ, rank_variables.master(world, os.environ))
    world.close()

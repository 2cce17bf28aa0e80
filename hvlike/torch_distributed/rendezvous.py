"""Where init_process_group("hvlike") gets rank, size and store from: MPI's rank and size, and a store over hvlike.

MASTER_ADDR and MASTER_PORT are not needed, and not used. RANK and WORLD_SIZE may be set, to what MPI says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from urllib.parse import parse_qs, urlparse

from hvlike.collectives.session import context
from hvlike.errors import LaunchError, UsageError
from hvlike.torch_distributed.store import MpiStore
from hvlike.transport.host.launchers import detect_launcher
from hvlike.transport.world import World


def find_place(url: str) -> tuple[MpiStore, int, int]:
    """Return the store, this rank and the number of ranks. Starts hvlike if it does not run.

    Collective: every rank calls it. Blocks until all have. url: env://, with the rank and world_size that
    init_process_group was given.

    Raises:
        LaunchError: On every rank, where this is no MPI job of as many ranks as the environment says.
        UsageError: Where rank or world_size are not MPI's.
    """
    world = start_hvlike()
    given = parse_qs(urlparse(url).query)
    rank, size = (int(given[name][0]) if name in given else None for name in ("rank", "world_size"))
    check_place(rank, size, world)
    # After a loss the variables are those of before, and this rank may have another number.
    anew = world.job is not None and world.job.losses > 0
    if rank is None and size is None and not anew:
        check_environment(os.environ, world.rank, world.size)
    set_variables(os.environ, world, anew=anew)
    return MpiStore(), world.rank, world.size


def start_hvlike() -> World:
    """Return the world of hvlike, which is started if it does not run yet. Collective and blocking in that case."""
    context.start_context(None, [])
    return context.current().world


def check_place(rank: int | None, size: int | None, world: World) -> None:
    """Check what init_process_group was given. Raises: UsageError, LaunchError."""
    wrong = []
    if rank is not None and rank != world.rank:
        wrong.append(f"rank={rank}, but this is MPI's rank {world.rank}")
    if size is not None and size != world.size:
        wrong.append(f"world_size={size}, but MPI has started {world.size} {'rank' if world.size == 1 else 'ranks'}")
    if not wrong:
        return
    if world.size == 1 and size is not None and size > 1:
        raise LaunchError(_alone(f"world_size={size}", size))
    raise UsageError(
        f'init_process_group("hvlike") got {" and ".join(wrong)}. Leave out rank, world_size and store: they are '
        "MPI's. For some of the ranks make a group (torch.distributed.new_group)."
    )


def check_environment(environment: Mapping[str, str], rank: int, size: int) -> None:
    """RANK and WORLD_SIZE say what MPI says; or what the launcher says, where hvlike runs on some ranks of its job."""
    launcher = detect_launcher(environment)
    for name, number, of_launcher in (
        ("WORLD_SIZE", size, launcher and launcher.size),
        ("RANK", rank, launcher and launcher.rank),
    ):
        value = environment.get(name, str(number))
        if value in (str(number), str(of_launcher)):
            continue
        if name == "WORLD_SIZE" and size == 1:
            raise LaunchError(_alone(f"WORLD_SIZE={value}", value))
        raise LaunchError(
            f'init_process_group("hvlike"): the environment has {name}={value}, but this is MPI\'s rank {rank} of '
            f"{size}. Unset RANK and WORLD_SIZE, or start the program by mpirun alone (`mpirun -n N python ...`)."
        )


def _alone(said: str, size: object) -> str:
    return (
        f'init_process_group("hvlike"): {said}, but MPI has started one process here: each of the {size} would train '
        f"a model of its own. Start the program by `mpirun -n {size} python ...`, without torchrun or "
        "torch.multiprocessing.spawn."
    )


def set_variables(environment: MutableMapping[str, str], world: World, *, anew: bool = False) -> None:
    """Set the variables that torchrun sets, where they are missing or anew; RANK and WORLD_SIZE in any case."""
    node = next(place for place, ranks in enumerate(world.nodes) if world.rank in ranks)
    environment.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    others = {"LOCAL_RANK": world.local_rank, "LOCAL_WORLD_SIZE": world.local_size, "GROUP_RANK": node}
    for name, value in others.items():
        if anew or name not in environment:
            environment[name] = str(value)

"""The variables that torchrun sets, by which programs of torch know their rank: here with what MPI says.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE    as the ranks are numbered
    GROUP_RANK                                        the number of the node
    MASTER_ADDR, MASTER_PORT                          where rank 0 listens, for gloo and nccl; hvlike has no use for it

What is set already stays, unless hvlike itself has set it: after a loss, and after another init(), a rank may have
another number.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from ipaddress import IPv4Interface
from typing import TYPE_CHECKING, ClassVar

from hvlike.transport.host.launchers import detect_launcher

if TYPE_CHECKING:
    from hvlike.transport.world import World

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
_ANSWERS_OF_LINUX = {"address": 0x8915, "netmask": 0x891B}  # SIOCGIFADDR, SIOCGIFNETMASK


class Own:
    """What hvlike has set in this process."""

    values: ClassVar[dict[str, str]] = {}
    port: ClassVar[socket.socket | None] = None


def places(world: World) -> dict[str, str]:
    """The variables that say where this rank stands. Local."""
    place = world.place
    node = next(number for number, ranks in enumerate(place.nodes) if world.rank in ranks)
    found = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    found |= {"LOCAL_WORLD_SIZE": place.local_size, "GROUP_RANK": node}
    return {name: str(value) for name, value in found.items()}


def master(world: World, environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT: those of rank 0's environment, or an address that all nodes reach and a free port.

    Collective and blocking, by the communicator itself; of a world of one rank local.
    """
    answer = None
    networks = None
    if len(world.nodes) > 1:
        networks = world.comm.gather((socket.gethostname(), interfaces()) if world.local_rank == 0 else None, root=0)
    if world.rank == 0:
        nodes = [] if networks is None else [each for each in networks if each is not None]
        given = without_own(environment)
        answer = {
            ADDRESS: given.get(ADDRESS) or address_for(nodes),
            PORT: given.get(PORT) or str(reserve_port()),
        }
    found: dict[str, str] = answer if world.size == 1 and answer is not None else world.comm.bcast(answer, root=0)
    return found


def set_missing(environment: MutableMapping[str, str], found: Mapping[str, str], *, anew: bool = False) -> None:
    """Set the variables that are missing, or that hvlike has set. anew: all of them."""
    for name, value in found.items():
        if anew or not environment.get(name) or environment[name] == Own.values.get(name):
            environment[name] = Own.values[name] = value


def set_at_start(environment: MutableMapping[str, str], world: World) -> None:
    """What init() does in a job: a program started by hand, alone, may start others, which would inherit its rank.

    Collective and blocking, by the communicator itself.
    """
    if world.size > 1 or detect_launcher(environment) is not None:
        set_missing(environment, places(world) | master(world, environment))


def without_own(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what hvlike has set in this process: that of another job."""
    return {name: value for name, value in environment.items() if Own.values.get(name) != value}


def reserve_port() -> int:
    """A free port of this host; the system gives it to nobody else until this process ends.

    A socket that is bound with SO_REUSEADDR and does not listen keeps it from those who ask for any port, and lets a
    server that names it, such as torch's TCPStore, listen there.
    """
    if Own.port is None:
        Own.port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        Own.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        Own.port.bind(("", 0))
    number: int = Own.port.getsockname()[1]
    return number


def address_for(nodes: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The address of the first node that all can reach. Pure function.

    nodes: of each its host name and its interfaces, as "10.0.0.1/255.0.0.0"; none where there is one node. An address
    counts if it is in a network of every other node, and of no other node itself, as those of Docker's bridges are.
    """
    if len(nodes) < 2 or all(each == nodes[0] for each in nodes):
        return "127.0.0.1"
    (name, first), *rest = nodes
    others = [[IPv4Interface(text) for text in texts] for _, texts in rest]
    for each in map(IPv4Interface, first):
        in_all = all(any(each.ip in other.network for other in node) for node in others)
        if in_all and not each.is_loopback and not any(each.ip == other.ip for node in others for other in node):
            return str(each.ip)
    return name


def interfaces() -> list[str]:
    """The IPv4 interfaces of this host that have an address, as "10.0.0.1/255.0.0.0"."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                address, netmask = (
                    socket.inet_ntoa(fcntl.ioctl(asked.fileno(), number, request)[20:24])
                    for number in _ANSWERS_OF_LINUX.values()
                )
            except OSError:
                # It has none.
                continue
            found.append(f"{address}/{netmask}")
    return found

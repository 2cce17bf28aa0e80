"""What around a rank is known to keep MPI or NCCL from working on large systems, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvlike.transport.host.launcher_table import HYDRA, SRUN
from hvlike.transport.host.launchers import Hidden, detect_launcher, hidden_launcher

_GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
_FOLDERS = ("PMIX_SERVER_TMPDIR", "PALS_SPOOL_DIR")  # Where launchers have their sockets and files for ranks
_SERVER = re.compile(r"tcp4://(127\.[\d.]+):(\d+)")  # In PMIX_SERVER_URI: where it listens for the ranks of its host
_LISTENS = "0A"  # The state of a socket in /proc/net/tcp
_NETWORK, _NCCL_NETWORK = "hsn", "NCCL_SOCKET_IFNAME"  # How interfaces of Slingshot begin; which one NCCL takes
_MONITOR = "FI_MR_CACHE_MONITOR"  # How libfabric notices that registered memory is freed
_PLUGINS = ("libnccl-net*.so*", "librccl-net*.so*")


class Oddity(NamedTuple):
    """Something that stands in the way, and the way out."""

    text: str
    advice: str


def look_around(environment: Mapping[str, str], *, gpus: bool) -> tuple[Oddity, ...]:
    """What is odd around this process. Local. gpus: whether the machine has some."""
    network = Path("/sys/class/net")
    interfaces = sorted(os.listdir(network)) if gpus and network.is_dir() else []
    found = [
        *hidden(hidden_launcher(environment)),
        *gpu_support(environment),
        *missing_folders(environment),
        *unreachable_server(environment, listening_ports()),
        *closed_descriptor(environment),
        *nccl_network(environment, interfaces),
    ]
    return tuple(found)


def hidden(launcher: Hidden | None) -> list[Oddity]:
    """Where a container between launcher and rank has dropped the launcher's variables."""
    if launcher is None:
        return []
    text = f"the variables of {launcher.name} end at the process {launcher.wrapper!r} above this one"
    advice = "Each rank would be a job of its own: let the variables pass (no --cleanenv, no `env -i`, `sudo -E`)."
    return [Oddity(text, advice)]


def gpu_support(environment: Mapping[str, str]) -> list[Oddity]:
    """Where Cray MPICH is to handle memory of GPUs, which can deadlock beside NCCL."""
    if environment.get(_GPU_SUPPORT) != "1":
        return []
    advice = (
        f"hvlike hands MPI host memory only, and GPUs to NCCL: export {_GPU_SUPPORT}=0, beside NCCL 1 can deadlock."
    )
    return [Oddity(f"{_GPU_SUPPORT}=1", advice)]


def missing_folders(environment: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists) -> list[Oddity]:
    """Where a container hides the folder in which the launcher waits for its ranks."""
    given = {name: environment[name] for name in _FOLDERS if environment.get(name)}
    return [
        Oddity(f"{name}={path} does not exist here", f"A container hides it: bind it (`--bind {path}`).")
        for name, path in given.items()
        if not exists(path)
    ]


def unreachable_server(environment: Mapping[str, str], ports: Collection[int]) -> list[Oddity]:
    """Where a container has a network of its own, without the server of PMIx. ports: on which somebody listens."""
    for name, uri in sorted(environment.items()):
        found = _SERVER.search(uri) if name.startswith("PMIX_SERVER_URI") else None
        if found and int(found[2]) not in ports:
            advice = "A container has a network of its own: give it that of the host (`--network=host`, no `--net`)."
            return [Oddity(f"nobody listens at {found[1]}:{found[2]}, which {name} names", advice)]
    return []


def listening_ports(table: Path = Path("/proc/net/tcp")) -> frozenset[int]:
    """The ports of this network at which somebody listens; all of them where that is not told. Connects to none."""
    if not table.is_file():
        return frozenset(range(1 << 16))
    rows = map(str.split, table.read_text().splitlines()[1:])
    return frozenset(int(row[1].partition(":")[2], 16) for row in rows if row[3] == _LISTENS)


def closed_descriptor(environment: Mapping[str, str]) -> list[Oddity]:
    """Where a process between launcher and rank has closed the connection that the rank should inherit."""
    launcher, number = detect_launcher(environment), environment.get("PMI_FD", "")
    if launcher is None or launcher.family not in (HYDRA, SRUN) or not number.isdecimal():
        return []
    try:
        os.fstat(int(number))
    except OSError:
        advice = "A wrapper has closed it: let it end in `exec`, or in Python pass it on (`close_fds=False`)."
        return [Oddity(f"PMI_FD={number} is not an open file, and {launcher.name} waits at its other end", advice)]
    return []


def nccl_network(environment: Mapping[str, str], interfaces: Sequence[str]) -> list[Oddity]:
    """Where NCCL would not use a Slingshot network. interfaces: of this machine; none where it has no GPU."""
    fast = [name for name in interfaces if name.startswith(_NETWORK)]
    if not fast:
        return []
    found = []
    if _NCCL_NETWORK not in environment:
        advice = (
            f"export {_NCCL_NETWORK}={fast[0]} (or {_NETWORK} for all of them), else NCCL may take another network."
        )
        found.append(Oddity(f"{_NCCL_NETWORK} is not set, and this is a Slingshot network", advice))
    folders = [Path(each) for each in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if each]
    has_plugin = any(True for folder in folders for pattern in _PLUGINS for _ in folder.glob(pattern))
    if not has_plugin and "NCCL_NET_PLUGIN" not in environment:
        advice = (
            "Load the site's OFI plugin (aws-ofi-nccl, aws-ofi-rccl): without it NCCL sends over TCP, and with "
            "NCCL_NET='AWS Libfabric' it says so and ends."
        )
        found.append(Oddity("no OFI plugin of NCCL on LD_LIBRARY_PATH", advice))
    if _MONITOR not in environment:
        advice = f"export {_MONITOR}=userfaultfd, or kdreg2 where the site says so: with the default NCCL may hang."
        found.append(Oddity(f"{_MONITOR} is not set, and this is a Slingshot network", advice))
    return found

"""What around a rank is known to keep MPI or NCCL from working on large systems, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvlike.transport.host.launchers import Hidden, hidden_launcher

_GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
_FOLDERS = ("PMIX_SERVER_TMPDIR", "PALS_SPOOL_DIR")  # Where launchers have their sockets and files for ranks
_NETWORK, _NCCL_NETWORK = "hsn", "NCCL_SOCKET_IFNAME"  # How interfaces of Slingshot begin; which one NCCL takes
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
        advice = "Load the site's OFI plugin (aws-ofi-nccl, aws-ofi-rccl); without it NCCL sends over TCP."
        found.append(Oddity("no OFI plugin of NCCL on LD_LIBRARY_PATH", advice))
    return found

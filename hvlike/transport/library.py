"""Which MPI library mpi4py would load, asked in a child process: MPI is not started, neither there nor here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hvlike.errors import LaunchError
from hvlike.transport.mpi import INSTALL_HINT

_SECONDS = 60

# Importing MPI with these settings loads the library and calls nothing that needs MPI_Init.
_QUESTION = """
import json
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
paths = sorted(path for path in files if path.rpartition("/")[2].startswith(("libmpi.", "libmpich.", "libmpi_")))
vendor, version = MPI.get_vendor()
print(json.dumps({
    "path": paths[0] if paths else "",
    "vendor": vendor,
    "version": ".".join(map(str, version)),
    "text": MPI.Get_library_version().strip("\\0 \\n").splitlines()[0],
}))
"""


@dataclass(frozen=True)
class Library:
    """An MPI library."""

    path: str
    """Of the shared object; empty where the system does not tell."""
    vendor: str
    """As mpi4py names it: "Open MPI", "MPICH", "Intel MPI", ..."""
    version: str
    text: str
    """The first line of what the library calls itself."""


def ask(environment: Mapping[str, str]) -> Library:
    """The library that a process with this environment would load. Local; takes a tenth of a second.

    Raises: LaunchError when mpi4py is missing or finds no library, with what to install.
    """
    command = [sys.executable, "-c", _QUESTION]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"asking {sys.executable} for the MPI library fails: {error}") from error
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()
        raise LaunchError(
            f"mpi4py of {sys.executable} loads no MPI library ({reason[-1] if reason else 'no reason given'}). "
            f"{INSTALL_HINT}"
        )
    return Library(**json.loads(answer.stdout))

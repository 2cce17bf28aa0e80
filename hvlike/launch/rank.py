"""One rank of a job of hvd.run: python -m hvlike.launch.rank FOLDER."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hvlike.errors import LaunchError
from hvlike.launch.job_folder import read_call, write_failure, write_result

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")


def rank_of(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process. MPI need not run. Raises: LaunchError."""
    for variable in _RANKS:
        if environment.get(variable, "").isdecimal():
            return int(environment[variable])
    raise LaunchError(f"run: the launcher has told this process no rank: none of {', '.join(_RANKS)} is set.")


def main(folder: Path) -> None:
    """Call the function and write its result or its exception, which is then raised."""
    rank = rank_of(os.environ)
    try:
        call = read_call(folder)
        write_result(folder, rank, call())
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            write_result(folder, rank, None)
        else:
            write_failure(folder, rank, error)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))

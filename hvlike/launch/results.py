"""What the function of hvd.run returns, on its way from a rank to the caller."""

from __future__ import annotations

from pathlib import Path

from hvlike.errors import UsageError
from hvlike.launch.call import packed, write


def result_of(folder: Path, rank: int) -> bytes | None:
    """What a rank has left as its result; None: nothing."""
    path = folder / f"result.{rank}"
    return path.read_bytes() if path.exists() else None


def write_result(folder: Path, rank: int, result: object) -> None:
    """Leave a result for the caller of hvd.run. Raises: UsageError for one that does not pickle."""
    try:
        data = packed(result, f"run: what the function has returned on rank {rank} (a {type(result).__name__})")
    except UsageError as error:
        raise UsageError(f"{error} Return tensors, numbers, strings, and lists and dicts of them.") from error
    write(folder / f"result.{rank}", data)

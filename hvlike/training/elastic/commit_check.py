"""Whether the ranks commit the same parameters: sums that went wrong after a failure would show nowhere else.

    sync()  commit 1   commit 2   commit 3 ...   a rank is lost   sync()  commit 8   commit 9   commit 10 ...
            compared   compared                                           compared   compared

Ranks that differ from the first commit on do so on purpose: each trains by itself between commits. After an error they
start from what rank 0 has, of which they are warned once. Where they were the same, a difference is an error.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.requests.reduction import Max
from hvlike.collectives.session.basics import rank
from hvlike.errors import MismatchError
from hvlike.training.gradients.checksums import checksum_of

logger = logging.getLogger("hvlike")

_COMMITS = 2  # After each sync(): the first may come before any step


class CommitCheck:
    """Compares the parameters of modules at the first commits after each start."""

    def __init__(self) -> None:
        self._left = 0
        self._before: int | None = None
        self._were_equal = False  # At a commit that was not the one before it again
        self._warned = False

    def start(self) -> None:
        """All ranks have the same parameters: they go on from there. Local."""
        self._left, self._before = _COMMITS, None

    def compare(self, commit: int, modules: Mapping[str, nn.Module]) -> None:
        """Compare the parameters of modules with those of the other ranks. Collective; blocks when a check is due.

        Raises: MismatchError on every rank, where they were the same at earlier commits and differ now.
        """
        if not self._left or not modules:
            return
        self._left -= 1
        named = {f"{name}.{key}": each for name, module in modules.items() for key, each in module.named_parameters()}
        checksums = [checksum_of(each) for each in named.values()]
        mine = zlib.crc32(repr(checksums).encode())
        told = torch.tensor([mine, -mine, int(self._were_equal)], device="cpu")
        highest, lowest, were_equal = allreduce(told, name="elastic.commit", op=Max).tolist()
        # A rank that was a spare until now has seen no commit.
        self._were_equal = bool(were_equal)
        if highest == -lowest:
            self._were_equal |= self._before not in (None, mine)
            self._before = mine
            return
        differs = describe_difference(list(named), allgather_object(checksums, name="elastic.commit.checksums"))
        if self._were_equal:
            raise MismatchError(
                f"commit {commit}: {differs}. They were the same at earlier commits, and all ranks have started from "
                "the same ones since: MPI, the network or the memory of a host has changed what ranks exchange. "
                "elastic.run goes back to the commit before. If it comes again, leave out the hosts of these ranks."
            )
        if rank() == 0 and not self._warned:
            logger.warning(
                "elastic: commit %d: %s. After an error or a lost rank all start from those of rank 0", commit, differs
            )
        self._warned = True


def describe_difference(names: Sequence[str], checksums: Sequence[Sequence[int]]) -> str:
    """Say which parameter, of these names, differs between which ranks; checksums: of each rank's, in that order."""
    if len({len(each) for each in checksums}) > 1:
        return f"ranks have different numbers of parameters: {[len(each) for each in checksums]}"
    columns = list(zip(*checksums, strict=True))
    different = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    first = different[0]
    groups: dict[int, list[int]] = {}
    for rank_, checksum in enumerate(columns[first]):
        groups.setdefault(checksum, []).append(rank_)
    held = ", ".join(f"{each:08x} on ranks {ranks}" for each, ranks in groups.items())
    what = f"parameter {names[first]} differs between ranks"
    return f"{what} (checksums: {held}; {len(different)} of {len(names)} parameters differ)"

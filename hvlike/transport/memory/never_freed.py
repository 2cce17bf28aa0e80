"""Memory that is never freed: somebody may still use it, and nobody can say for how long."""

from __future__ import annotations

from typing import Any

from hvlike.system.system import of_process

ABANDONED_REQUEST = "MPI may still use the memory of a request that was given up"
SILENT_SENDER = "a sender that does not answer may still write there"
ABANDONED_REDUCTION = "other ranks may still reach into the tensors of a reduction that was given up"


class _Kept:
    def __init__(self) -> None:
        self.things: list[tuple[str, Any]] = []


_process = of_process(_Kept)


def keep_forever(why: str, *things: Any) -> None:
    """Keep these until the process ends. Any thread. why: one of the reasons above."""
    _process.things += [(why, each) for each in things]


def kept_forever(why: str) -> list[Any]:
    """Return what was kept for this reason so far."""
    return [each for reason, each in _process.things if reason == why]

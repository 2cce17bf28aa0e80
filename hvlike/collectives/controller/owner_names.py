"""Names for what lives long and is matched between ranks: optimizers, wrapped models, planned queues.

They are numbered in the order of their first use, which is the same on all ranks only within one thread: the ranks'
threads run as they like. Two threads in which objects are numbered together are an error, on all ranks: the object that
was numbered before is told, too, as on another rank it may be the second one.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from hvlike.collectives.controller.tensor_queue import AutomaticNames
from hvlike.errors import UsageError
from hvlike.system.system import system

_OURS = "hvlike-"  # Threads that run calls of other ranks: the callers' order counts there


class Owner(Protocol):
    """What has a name."""

    def refuse(self, error: UsageError) -> None:
        """Raise this error in the next step. Any thread."""


@dataclass(eq=False)
class _Claim:
    owner: weakref.ref[Owner]
    made_in: threading.Thread | None
    used_in: threading.Thread | None = None
    refused: UsageError | None = None

    def refuse(self, error: UsageError) -> None:
        self.refused = error
        owner = self.owner()
        if owner is not None:
            owner.refuse(error)


class OwnerNames(AutomaticNames):
    def __init__(self) -> None:
        super().__init__()
        self._claims: dict[str, list[_Claim]] = {}
        self._guard = system.Lock()

    def announce(self, kind: str, owner: Owner) -> None:
        """It was made in this thread and will be numbered among its kind."""
        thread = threading.current_thread()
        with self._guard:
            self._living(kind).append(_Claim(weakref.ref(owner), thread))

    def claim(self, kind: str, owner: Owner, advice: str, thread: threading.Thread | None) -> int:
        """The number of an owner. Raises: UsageError, if another one that lives is numbered in another thread.

        thread: of the program, in which it is used; None: that is not known.
        """
        with self._guard:
            claims = self._living(kind)
            mine = next((each for each in claims if each.owner() is owner), None)
            if mine is None:
                mine = _Claim(weakref.ref(owner), thread)
                claims.append(mine)
            mine.used_in = thread
            others = [each for each in claims if each is not mine]
            elsewhere = {each: other for each in others for other in [_other_thread(mine, each)] if other is not None}
            if mine.refused is None and not elsewhere:
                return self.draw(kind)
        if mine.refused is None:
            threads = sorted({each.name for each in (thread, *elsewhere.values()) if each is not None})
            mine.refused = UsageError(
                f"{kind}: objects of this kind are used in several threads ({', '.join(threads)}). {advice}"
            )
        for claim in elsewhere:
            claim.refuse(mine.refused)
        raise mine.refused

    def _living(self, kind: str) -> list[_Claim]:
        claims = self._claims[kind] = [each for each in self._claims.get(kind, []) if each.owner() is not None]
        return claims


def _other_thread(mine: _Claim, other: _Claim) -> threading.Thread | None:
    """The thread of the other one, if the ranks may number the two in another order."""
    here, there = (mine.used_in, other.used_in) if other.used_in is not None else (mine.made_in, other.made_in)
    if here is there or here is None or there is None or not there.is_alive():
        return None
    return None if here.name.startswith(_OURS) or there.name.startswith(_OURS) else there

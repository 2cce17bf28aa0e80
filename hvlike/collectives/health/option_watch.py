"""Options of an optimizer that differ between the ranks, a learning rate say: each is said once.

With the agreement on a plan each rank compares its own with those of the first rank. After steps 1, 2, 4, ... 64, 128,
192, ..., and before hvlike ends, it looks at them again. Where they have changed it sends them to the next rank of the
set, which compares them with its own after the same step: unless all have changed alike, some rank now differs from the
one before it. The first rank logs what was found.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakMethod

from hvlike.collectives.requests.plan import Options, find_difference
from hvlike.observe.looking import only_looks
from hvlike.system.system import system
from hvlike.transport.loop.coroutine import in_loop
from hvlike.transport.world import Group

logger = logging.getLogger("hvlike")

ReadOptions: TypeAlias = Callable[[bool], Options]
"""Whether hvlike is about to end: what was begun stays unfinished then."""

MOST_STEPS = 64  # Between two looks; options that are scheduled change for long
_AT_END = sys.maxsize  # In place of a step
_KEPT = 4  # Looks of this rank, and of the rank before it, that are compared later: a step keeps the ranks together


class OptionWatch:
    def __init__(
        self, owner: str, group: Group, send: Callable[[int, tuple[Any, ...]], None], read: WeakMethod[ReadOptions]
    ) -> None:
        """send: calls `hear` on that rank, with this rank and what is sent, on the watch of the same owner."""
        self._owner = owner
        self._ranks = group.ranks
        self._before = group.ranks[group.rank - 1]
        self._next = group.ranks[(group.rank + 1) % group.size]
        self._me = group.ranks[group.rank]
        self._send = send
        self._read = read
        self._plan = -1
        self._looks: dict[int, Options] = {}  # By step, the last few
        self._early: dict[int, Options] = {}  # Of the rank before this one, which is further on
        self._told: set[str] = set()
        self._lock = system.Lock()

    def read(self, *, at_end: bool = False) -> Options:
        return _read(self._read, at_end)

    def begin(self, plan: int, agreed: Options, options: Options) -> None:
        """A plan was agreed, by ranks of which the first has proposed these options and this one those."""
        with self._lock:
            self._plan, self._looks = plan, {0: options}
        self._compare(self._ranks[0], agreed, options)

    def look(self, plan: int, step: int) -> int:
        """Look at the options after this step of the plan of this number; return after which step to look next."""
        options = self.read(at_end=step == _AT_END)
        with self._lock:
            if plan != self._plan:
                self._plan, self._looks = plan, {}
            before = next(reversed(self._looks.values()), None)
            _keep(self._looks, step, options)
            early = self._early.pop(step, None)
        if options != before:
            self._send(self._next, (plan, step, options))
        if early is not None:
            self._compare(self._before, early, options)
        return step + min(step, MOST_STEPS)

    def look_at_end(self) -> None:
        """Look once more before hvlike ends: this rank may have left out the last step(). Local."""
        if self._plan >= 0 and self._read() is not None:
            self.look(self._plan, _AT_END)

    @in_loop
    def hear(self, rank: int, plan: int, step: int, options: Any) -> None:
        """The options of the rank before this one; on the first rank also what another one has found."""
        if step < 0:
            self._tell(*options)
            return
        with self._lock:
            ours = self._looks.get(step) if plan == self._plan else None
            if ours is None and (plan > self._plan or step > max(self._looks, default=0)):
                _keep(self._early, step, options)
        if ours is not None:
            self._compare(self._before, options, ours)

    def _compare(self, rank: int, theirs: Options, ours: Options) -> None:
        found = find_difference(theirs, ours)
        if found is None:
            return
        name, its, mine = found
        values = sorted([(rank, its), (self._me, mine)])
        if self._me == self._ranks[0]:
            self._tell(name, values)
        else:
            self._send(self._ranks[0], (self._plan, -1, (name, values)))

    def _tell(self, name: str, values: list[tuple[int, str]]) -> None:
        if name in self._told:
            return
        self._told.add(name)
        (rank, value), (other, its) = values
        logger.warning(
            "%s of %r: %s on rank %d, %s on rank %d. What the ranks train drifts apart. Set the same options on every "
            "rank and let each call step() as often; hvd.broadcast_optimizer_state(optimizer, root_rank=%d) makes "
            "options equal, hvd.broadcast_parameters(model.state_dict(), root_rank=%d) parameters.",
            name,
            self._owner,
            value,
            rank,
            its,
            other,
            self._ranks[0],
            self._ranks[0],
        )


@only_looks(())
def _read(reader: WeakMethod[ReadOptions], at_end: bool) -> Options:
    read = reader()
    return () if read is None else read(at_end)


def _keep(looks: dict[int, Options], step: int, options: Options) -> None:
    looks[step] = options
    while len(looks) > _KEPT:
        del looks[next(iter(looks))]

"""All backwards that this worker has to do with: whom a letter is for, and what is remembered of those that are over.

A worker that has finished its part may still be asked about a message that was opened late, so a backward is
remembered until its root has ended it: letters of the root's later backwards in the same context say so, or the
release of the context.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import Tensor

from hvlike.autograd.contexts import Contexts
from hvlike.autograd.distributed_context import DistributedContext
from hvlike.autograd.identifiers import Identifiers, giver_of
from hvlike.autograd.letter import Letter
from hvlike.autograd.local_machine import Roots
from hvlike.autograd.messages import LETTER, Heading, Wire, encode, heading_of, opens
from hvlike.autograd.protocol import Mode
from hvlike.autograd.run import Run
from hvlike.rpc.agent import Agent
from hvlike.rpc.contexts import NO_MESSAGE, unknown


@dataclass
class _OfContext:
    """The backwards of one context."""

    runs: dict[int, Run] = field(default_factory=dict)
    """By number."""
    oldest: dict[int, int] = field(default_factory=dict)
    """By root: those of it with lower numbers are over."""


class Runs:
    """Those of one session."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        """Take letters from now on."""
        self.agent = agent
        self._contexts = contexts
        self._numbers = Identifiers(agent.rank)
        self._lock = threading.Lock()
        self._known: dict[int, _OfContext] = {}
        agent.take(LETTER, self._take)
        agent.when_lost.append(self._lose)

    def begin(self, context: DistributedContext, roots: Roots, mode: Mode, retain_graph: bool) -> Run:
        """A new one whose root is this worker."""
        with self._lock:
            number = self._numbers.new()
            runs = self._known.setdefault(context.id, _OfContext()).runs
            oldest = min((each for each in runs if giver_of(each) == self.agent.rank), default=number)
            heading = Heading(context.id, number, oldest, mode, retain_graph)
            run = runs[number] = Run(self, context, heading, roots)
        return run

    def forget(self, run: Run) -> None:
        """Nothing more comes of it. From any thread."""
        heading = run.heading
        run.context.disengage(heading.number)
        with self._lock:
            known = self._known.get(heading.context)
            if known is not None:
                known.runs.pop(heading.number, None)
                if not known.runs:
                    del self._known[heading.context]

    def is_live(self, context: DistributedContext) -> bool:
        """Whether the context has not been released."""
        return self._find(context.id) is context

    def end(self, error: str) -> None:
        """The session is over."""
        for run in self._all():
            run.fail(error)
        self._known.clear()

    # -- in the loop --------------------------------------------------------------------------

    def _take(self, source: int, wire: Wire, storages: list[Tensor]) -> None:
        with self._lock:
            known = self._known.get(wire[0])
            run = known.runs.get(wire[1]) if known is not None else None
        if run is None and opens(wire):
            run = self._open(heading_of(wire), source)
        if run is not None:
            run.hear(source, wire, storages)

    def _open(self, heading: Heading, source: int) -> Run | None:
        """Remember a backward that this worker has not heard of; None where it is over."""
        root = giver_of(heading.number)
        if root == self.agent.rank:
            return None
        # The message that is to make the context known here may still wait for a thread.
        self._contexts.came((heading.context, NO_MESSAGE), source, ())
        context = self._find(heading.context)
        if context is None:
            answer = Letter(error=f"Error on Node {self.agent.rank}: {unknown(heading.context)}")
            self.agent.post(source, LETTER, *encode(heading, answer, source))
            return None
        with self._lock:
            known = self._known.setdefault(heading.context, _OfContext())
            if heading.number < known.oldest.get(root, 0):
                return None
            known.oldest[root] = heading.oldest
            over = [each for number, each in known.runs.items() if giver_of(number) == root and number < heading.oldest]
            run = known.runs[heading.number] = Run(self, context, heading, ())
        for each in over:
            self.forget(each)
        return run

    def _find(self, context: int) -> DistributedContext | None:
        try:
            return self._contexts.find(context)
        except RuntimeError:
            return None

    def _lose(self, rank: int, error: Exception) -> None:
        for run in self._all():
            run.lost(rank, str(error))

    def _all(self) -> list[Run]:
        with self._lock:
            return [run for known in self._known.values() for run in known.runs.values()]

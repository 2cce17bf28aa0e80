"""Which buckets of a step start during backward, and what moves them then."""

from __future__ import annotations

import enum

import torch

from hvlike.collectives.requests.plan import Plan
from hvlike.system.system import system
from hvlike.transport.host.topology import SpareCore

SLOW_STEPS = 3  # In a row; one alone may have met a rank that was held up


class Mover(enum.Enum):
    """What moves a bucket that has started during backward."""

    NOTHING = "nothing"
    """No bucket starts before backward has ended."""
    DEVICE = "device"
    """The stream of a GPU, which needs no core: the host only has to begin."""
    LOOP = "loop"
    """The background thread, on a core that is spare."""
    HOOKS = "hooks"
    """The hooks of backward, between two layers. A wire needs no core."""


def choose_mover(wanted: bool | None, *, spare_core: bool, on_device: bool) -> Mover:
    """Decide for a plan that is new; `wanted`: what the user has set, None for nothing."""
    if on_device:
        return Mover.NOTHING if wanted is False else Mover.DEVICE
    return Mover.LOOP if spare_core else Mover.NOTHING


class EarlyStarts:
    """What is ready of the step under way. Backward has several threads: used with `lock` held."""

    def __init__(self, mover: Mover, *, automatic: bool, several_nodes: bool) -> None:
        """automatic: nothing is set, and the mover may change with what steps show."""
        self.mover = mover
        self.lock = system.Lock()
        self.marked: dict[int, torch.Tensor] = {}  # What is ready, by entry, as far as that is known
        self.started = 0  # The buckets of the step under way that have started: the first ones of the plan
        self._spare_core = SpareCore() if mover is Mover.LOOP and automatic else None
        self.may_use_hooks = several_nodes and automatic
        self._slow_steps = 0
        self._bucket_of: dict[int, int] = {}
        self._sizes: list[int] = []
        self._missing: list[int] = []
        self._most = 0

    def follow(self, plan: Plan | None) -> None:
        """The ranks have agreed on a plan, or given it up."""
        buckets = [] if plan is None else plan.buckets
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        # The last bucket tells whether this rank lacks some tensors, and of sparse ones only the end of a step knows.
        self._most = len(buckets) - bool(plan is not None and plan.sparse)
        self.expect_all()

    def expect_all(self) -> None:
        """A step begins: no tensor is ready."""
        self._missing = self._sizes.copy()
        self.started = 0

    def bucket_of(self, index: int) -> int | None:
        """The bucket of an entry; None where there is none, or no bucket starts early."""
        return None if self.mover is Mover.NOTHING else self._bucket_of.get(index)

    def ready(self, bucket: int) -> range:
        """One more tensor of a bucket is ready; the buckets that are to start now: all before them are complete."""
        first = self.started
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            if not first and self._spare_core is not None and self._spare_core.is_gone():
                # Nobody would move what is started early. The buckets stay as they are agreed.
                self.mover, self._spare_core = Mover.NOTHING, None
                return range(0)
            while self.started < self._most and not self._missing[self.started]:
                self.started += 1
        return range(first, self.started)

    def start_rest(self) -> range:
        """The buckets that have not started; they count as started."""
        first, self.started = self.started, len(self._sizes)
        return range(first, self.started)

    def note_speed(self, *, slow: bool) -> None:
        """A step has ended; slow: on a network on which it pays to start early also where no core is spare."""
        self._slow_steps = self._slow_steps + 1 if slow else 0
        if self.may_use_hooks and self._slow_steps == SLOW_STEPS and len(self._sizes) > 1:
            self.may_use_hooks = False
            self.mover = Mover.HOOKS

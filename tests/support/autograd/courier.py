"""Holds back notices between workers for moments that a seed draws, so that they come in many orders."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hvlike.rpc.agent.agent import Agent

Post = Callable[[], None]


class Courier:
    """Takes what a worker posts and hands it on from a thread: to each worker in order, between workers at random."""

    def __init__(self, seed: int, part: float, seconds: float) -> None:
        """part: of the notices that are held back; seconds: at most."""
        self._draw = random.Random(seed)
        self._part, self._seconds = part, seconds
        self._bags: dict[int, deque[Post]] = {}
        self._something = threading.Condition()
        self._ended = False
        self.carried = 0
        """Notices so far."""
        self._thread = threading.Thread(target=self._run, name="courier")

    @contextmanager
    def instead_of_the_agent(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Courier]:
        """Inside the block all that this process posts goes through the courier; nothing is left with him after it."""
        post = Agent.post

        def hand_over(agent: Agent, rank: int, *what: Any, now: bool = True) -> None:
            with self._something:
                self._bags.setdefault(rank, deque()).append(lambda: post(agent, rank, *what))
                self._something.notify()

        self._thread.start()
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "post", hand_over)
            yield self
        with self._something:
            self._ended = True
            self._something.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._something:
                self._something.wait_for(lambda: self._ended or any(self._bags.values()))
                if not any(self._bags.values()):
                    return
            if self._draw.random() < self._part:
                time.sleep(self._draw.random() * self._seconds)
            with self._something:
                bag = self._bags[self._draw.choice([rank for rank, bag in self._bags.items() if bag])]
            # Only this thread takes out: what is first stays first.
            bag.popleft()()
            self.carried += 1

"""The heartbeat: one number summed up over the ranks in each iteration, 1 from those that have inputs, 0 from others.

Needed where a Joinable of the user's own communicates, whose operations only its own hook can shadow, and to throw on
early termination. What hvlike brings itself carries its own count.
"""

from __future__ import annotations

import torch

from hvlike.collectives.allreduce import allreduce_async
from hvlike.collectives.handles import Handle
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.request import Key
from hvlike.planes.ops import ReduceOp


class Heartbeat:
    """The heartbeats of one context."""

    def __init__(self, number: int, process_set: ProcessSet | None) -> None:
        """number: of the context, the same on all ranks."""
        self._name = f"Join.{number}"
        self._process_set = process_set
        self.count = 0
        """Heartbeats that this rank has begun."""

    def beat(self, *, active: bool) -> Handle:
        """Begin a heartbeat: the sum over the ranks is how many have inputs. Collective over the set."""
        number = torch.tensor([float(active)], device="cpu")
        # As the heartbeat of the next iteration may begin before this one has ended, each has a name of its own.
        _, name = self.key
        self.count += 1
        return allreduce_async(number, name=name, op=ReduceOp.SUM, process_set=self._process_set)

    @property
    def key(self) -> Key:
        """What identifies the heartbeat that begins next."""
        return ("allreduce", f"{self._name}.heartbeat.{self.count + 1}")

    def agree(self, values: list[int]) -> list[int]:
        """Return the highest of each value over the ranks. Collective over the set; blocks."""
        name = f"{self._name}.agreement"
        handle = allreduce_async(
            torch.tensor(values, device="cpu"), name=name, op=ReduceOp.MAX, process_set=self._process_set
        )
        highest: list[int] = handle.result().tolist()
        return highest


def active_ranks(handle: Handle) -> int:
    """How many ranks have inputs. Blocks until the heartbeat has ended."""
    return int(handle.result().item())

"""RandomState: the generators of random numbers as a part of the state, so that what is repeated draws the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvlike.collectives.api.objects import allgather_object
from hvlike.collectives.session.basics import rank


class RandomState:
    """The generators of random numbers of each rank: torch's for CPU and current GPU, Python's and numpy's.

    As a part of an elastic state they go back with it, so dropout and augmentation draw the same when steps are
    repeated, also on a spare that takes the place of a lost rank. A checkpoint has those of all ranks; at another
    number of ranks, those without a saved state keep what they have. Generators in the workers of a DataLoader are
    seeded from torch's when an epoch begins.

    Example:
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, random=hvd.elastic.RandomState(), step=0)

    Source: torch.get_rng_state, random.getstate, numpy.random.get_state.
    """

    state_is_local = True

    def __init__(self) -> None:
        self._gathered: list[dict[str, Any]] = []

    def local_state_dict(self) -> dict[str, Any]:
        """Return the generators of this rank. Local."""
        version, words, gauss = random.getstate()
        kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
        state = {
            "torch": torch.get_rng_state(),
            "python": [version, list(words), gauss],
            "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
        """Set the generators of this rank, if it was there at the commit. Collective: all ranks.

        Args:
            states: What local_state_dict() has returned, by rank.
            ranks_before: How many ranks there were at the commit.
        """
        for number, state in states.items():
            if number == rank():
                _set(state)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Have state_dict() return the generators of all ranks. Collective: all ranks; blocks.

        Args:
            to: The rank that needs it; all of them get it.
        """
        self._gathered = allgather_object(self.local_state_dict(), name="elastic.random")

    def state_dict(self) -> dict[str, Any]:
        """Return the generators of all ranks as of the last consolidate_state_dict(). Local."""
        return {"ranks": self._gathered}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators of this rank. Local.

        Args:
            state_dict: What state_dict() has returned.
        """
        states = state_dict["ranks"]
        if rank() < len(states):
            _set(states[rank()])


def _set(state: Mapping[str, Any]) -> None:
    # torch reads a state that lies somewhere in other memory from a wrong place.
    torch.set_rng_state(state["torch"].clone())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())

"""Parts of an elastic state that each rank has another one of: buffers of modules, and generators of random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.collectives.session.basics import rank, size


def unwrapped(value: Any) -> Any:
    """The module inside a DistributedDataParallel: its names then fit the model without it."""
    inner = getattr(value, "module", None)
    wraps = isinstance(value, nn.Module) and type(value).__name__ == "DistributedDataParallel"
    return inner if wraps and isinstance(inner, nn.Module) else value


class ModuleBuffers:
    """The buffers of a module in its state dict, as a part of an elastic state beside the module itself.

    With as many ranks as at the commit each rank gets its own back. With fewer or more, all get those of rank 0 at the
    commit, as if they began from a checkpoint. Where neighbours were lost together, all keep what the sync() of the
    module has given them: those of rank 0 now.
    """

    state_is_local = True
    may_be_lost = True

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrapped(module)
        self._gathered: dict[str, Any] = {}

    def local_state_dict(self) -> dict[str, Any]:
        """Return the buffers of this rank, by name; they are not copied. Local."""
        saved = self._module.state_dict()
        return {name: each for name, each in self._module.named_buffers(remove_duplicate=False) if name in saved}

    def load_local_state_dicts(self, states: Mapping[int, dict[str, Any]], ranks_before: int) -> None:
        """Set the buffers of this rank; see LocalState. Collective: all ranks."""
        if states:
            self._set(states[rank() if ranks_before == size() else 0])

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Have state_dict() return the buffers of all ranks on the rank `to`. Collective: all ranks; blocks."""
        own = {name: value.detach().cpu() for name, value in self.local_state_dict().items()}
        self._gathered = {"ranks": size(), "different": {}}
        if not own:
            return
        root = broadcast_object(own, to, name="elastic.buffers.root")
        # Masks and tables of constants are the same everywhere: the file need not have them for each rank.
        different = {name: value for name, value in own.items() if not _is_equal(value, root.get(name))}
        for each in range(size()):
            came = broadcast_object(different, each, name=f"elastic.buffers.{each}")
            if came and rank() == to:
                self._gathered["different"][each] = came

    def state_dict(self) -> dict[str, Any]:
        """Return what differs from the state dict of the module, as of the last consolidate_state_dict(). Local."""
        return self._gathered

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the buffers of this rank, if there are as many ranks as there were. Local; after that of the module."""
        if state_dict["ranks"] == size():
            self._set(state_dict["different"].get(rank(), {}))

    def _set(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.local_state_dict().items():
                if name in state:
                    value.copy_(state[name])


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype is other.dtype and torch.equal(one, other)


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
                _set_generators(state)

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
            _set_generators(states[rank()])


def _set_generators(state: Mapping[str, Any]) -> None:
    # torch reads a state that lies somewhere in other memory from a wrong place.
    torch.set_rng_state(state["torch"].clone())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())

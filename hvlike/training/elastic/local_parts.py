"""Parts of an elastic state that each rank has another one of.

ModuleBuffers    the buffers of a module
RandomState      the generators of random numbers
ElasticSampler   what is processed of an epoch: each index comes once, whatever happens to the ranks
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.collectives.session.basics import rank, size
from hvlike.observe.looking import only_looks


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


@only_looks(False)
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


def order_of(length: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(length))
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch), device="cpu").tolist()


def share_of(indices: Sequence[int], rank: int, size: int, order: Sequence[int]) -> list[int]:
    """Every size-th index from `rank` on. Where the shares would not be equally long, the first ones of the epoch come
    again: those of `order`, so that the rest of an epoch is divided as it would have been without a restart.
    """
    length = -(-len(indices) // size) * size
    filled = [*indices, *(order[place % len(order)] for place in range(length - len(indices)))]
    return filled[rank::size]


class ElasticSampler(Sampler[int]):
    """Divides the rest of an epoch among the ranks.

    An epoch starts with set_epoch(). record_batch() after each batch records what was processed; after a restart, or
    load_state_dict(), only the rest is handed out. In a TorchState, commit() and sync() merge what all ranks have
    recorded, so the indices that a lost rank has processed up to the last commit do not come again.
    All shares are equally long: fewer indices than there are ranks come twice where the rest cannot be divided. Local.

    Args:
        dataset: Anything with a length, the same on every rank.
        shuffle: Use an order that depends on seed and epoch alone; else that of the dataset.
        seed: Seed of the order.

    Raises:
        NotInitializedError: init() has not been called.

    Source: horovod.torch.elastic.ElasticSampler.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self._recorded: list[int] = []
        self.num_replicas = self.rank = 0
        """The number of ranks the epoch is divided among, and this rank's number among them."""
        self.remaining_indices: list[int] = []
        """What was not processed when the epoch was divided last, of all ranks."""
        self.indices: list[int] = []
        """The share of this rank, in the order in which it is handed out."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed. Each rank calls it before it iterates, not after a restart.

        Args:
            epoch: Number of the epoch.
        """
        self.epoch = epoch
        self.processed_indices = set()
        self._recorded = []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch is processed.

        Args:
            batch_idx: Number of the batch since iteration began, from 0.
            batch_size: How many indices a batch has.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that indices are processed.

        Args:
            indices: The indices.
        """
        recorded = list(indices)
        self._recorded += recorded
        self.processed_indices.update(recorded)

    def merge(self, name: str) -> None:
        """Learn what the other ranks have recorded since the last time. Collective: all ranks; blocks.

        Args:
            name: Of this sampler, the same on every rank.
        """
        # Ranks that have begun the next epoch have nothing to say about this one.
        mine = torch.tensor([self.epoch, *self._recorded], dtype=torch.int64, device="cpu")
        sizes = allgather(torch.tensor([len(mine)], device="cpu"), name=f"{name}.sizes").tolist()
        for epoch, *recorded in (each.tolist() for each in torch.split(allgather(mine, name=name), sizes)):
            if epoch == self.epoch:
                self.processed_indices.update(recorded)
        self._recorded = []

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of a batch of this rank.

        Args:
            batch_idx: Number of the batch since iteration began, from 0.
            batch_size: How many indices a batch has.

        Returns:
            The indices.
        """
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and processed indices: those this rank has recorded, and all ranks' up to the last commit()."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state dict: what is left is divided anew.

        Args:
            state_dict: What state_dict() has returned.
        """
        processed: Collection[int] = state_dict["processed_indices"]
        self.epoch, self.processed_indices, self._recorded = state_dict["epoch"], set(processed), []
        self.reset()

    def reset(self) -> None:
        """Divide what is not processed yet among the ranks of now. Local."""
        order = order_of(len(self.dataset), self.seed, self.epoch, shuffle=self.shuffle)
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = [index for index in order if index not in self.processed_indices]
        self.indices = share_of(self.remaining_indices, self.rank, self.num_replicas, order)

    @property
    def num_samples(self) -> int:
        """How many indices each rank is handed."""
        return len(self.indices)

    @property
    def total_size(self) -> int:
        """How many indices all ranks together are handed, those that come twice included."""
        return self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

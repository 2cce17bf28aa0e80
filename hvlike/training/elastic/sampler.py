"""ElasticSampler: an epoch divided among the ranks, of which each index comes once, whatever happens to the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.session.basics import rank, size


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
    """Divides what is left of an epoch among the ranks.

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

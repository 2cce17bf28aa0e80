"""A Joinable that only counts: it sums up ones over the ranks, and proxies that with zeros."""

from typing import Any

import torch

import hvlike as hvd
from hvlike.join import Join, Joinable, JoinHook

BEFORE, AFTER = 41, 42


class CounterHook(JoinHook):
    """JoinedProxies the sums; afterwards one of the last joiners gives its tensor to all."""

    def __init__(self, counter: "Counter", sums: int) -> None:
        self.counter = counter
        self.sums = sums

    def main_hook(self) -> None:
        for _ in range(self.sums):
            hvd.allreduce(torch.zeros(1), op=hvd.Sum, process_set=self.counter.process_set)

    def post_hook(self, is_last_joiner: bool) -> None:
        counter = self.counter
        counter.is_last_joiner = is_last_joiner
        mine = torch.tensor([hvd.rank() if is_last_joiner else -1])
        authority = int(hvd.allreduce(mine, op=hvd.Max, process_set=counter.process_set))
        if is_last_joiner:
            counter.tensor.fill_(AFTER)
        counter.tensor = hvd.broadcast(counter.tensor, authority, process_set=counter.process_set)


class Counter(Joinable):
    """Each call is one iteration."""

    def __init__(self, sums: int = 1, process_set: Any = None) -> None:
        super().__init__()
        self.sums = sums
        self.process_set = process_set or hvd.global_process_set
        self.tensor = torch.tensor([BEFORE])
        self.is_last_joiner: bool | None = None
        self.given: dict[str, Any] = {}

    def __call__(self) -> int:
        """Sum up ones, as often as there are sums in an iteration; the total."""
        Join.notify_join_context(self)
        sums = int(self.given.get("num_allreduces", self.sums))
        totals = [hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=self.process_set) for _ in range(sums)]
        return int(sum(total.item() for total in totals))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.given = kwargs
        return CounterHook(self, int(kwargs.get("num_allreduces", self.sums)))

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.process_set


def expected_total(rank: int, size: int) -> int:
    """Of rank `rank` with 3 + rank inputs: all are there for three of them, then ever fewer."""
    return 3 * size + sum(size - missing for missing in range(1, rank + 1))

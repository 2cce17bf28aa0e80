"""A Joinable of one's own: it counts the inputs that all ranks have processed together.

    mpirun -n 2 python examples/joinable_counter.py

Rank r has 5 + r inputs. When rank 0 is through, its hook takes part in the sums of rank 1 with zeros. Rank 0 has seen
one input less by then; after the context both know the highest count.
"""

import torch

import hvlike as hvd
from hvlike.join import Join, Joinable, JoinHook

NUM_INPUTS = 5


class CounterHook(JoinHook):
    """What a counter does when its rank has no more inputs."""

    def __init__(self, counter: "Counter", sync_max_count: bool) -> None:
        self.counter = counter
        self.sync_max_count = sync_max_count

    def main_hook(self) -> None:
        """Take part in the sum of the others."""
        hvd.allreduce(torch.zeros(1), op=hvd.Sum)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Let all ranks know the highest count, where the context was given sync_max_count=True."""
        if self.sync_max_count:
            authority = hvd.allreduce(torch.tensor([hvd.rank() if is_last_joiner else -1]), op=hvd.Max)
            self.counter.max_count = hvd.broadcast(self.counter.count, root_rank=int(authority))


class Counter(Joinable):
    """Counts inputs on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)
        self.max_count = torch.zeros(1)

    def __call__(self) -> None:
        """Count this input, and those that the other ranks process at the same time."""
        Join.notify_join_context(self)
        self.count += hvd.allreduce(torch.ones(1), op=hvd.Sum)

    def join_hook(self, **kwargs: bool) -> CounterHook:
        """Return the hook for one context."""
        return CounterHook(self, sync_max_count=kwargs.get("sync_max_count", False))

    @property
    def join_device(self) -> torch.device:
        """Where the counts are."""
        return self.count.device

    @property
    def join_process_group(self) -> hvd.ProcessSet:
        """All ranks take part."""
        return hvd.global_process_set


def main() -> None:
    """Count, then show what each rank has counted."""
    hvd.init()
    counter = Counter()
    with Join([counter], sync_max_count=True):
        for _ in range(NUM_INPUTS + hvd.rank()):
            counter()
    everybody = hvd.allgather_object((int(counter.count), int(counter.max_count)))
    if hvd.rank() == 0:
        for rank, (count, highest) in enumerate(everybody):
            print(f"rank {rank}: {count} inputs processed before it joined, {highest} inputs processed on all ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()

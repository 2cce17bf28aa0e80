"""MpiStore: each call does what torch.distributed.Store documents, on any rank, directly and through a PrefixStore.

And hvlike's own way to start torch.distributed, for programs that use both: once, and never over another backend.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hvlike.errors import UsageError
from hvlike.integrations.torch_distributed import init_process_group
from hvlike.torch_distributed.store import MpiStore

SHORT = timedelta(seconds=0.2)


@pytest.fixture(params=["itself", "in a PrefixStore"])
def store(hvd: ModuleType, request: pytest.FixtureRequest) -> Any:
    """A new store of all ranks. torch calls that in a PrefixStore from C++."""
    own = MpiStore()
    return own if request.param == "itself" else dist.PrefixStore("prefix", own)


def test_what_a_rank_sets_the_others_get(store: Any, hvd: ModuleType) -> None:
    store.set(f"key{hvd.rank()}", f"value{hvd.rank()}")
    for rank in range(hvd.size()):
        assert store.get(f"key{rank}") == f"value{rank}".encode()
    long = "0123456789" * 100_000
    if hvd.rank() == hvd.size() - 1:
        store.set("long", long)
    assert store.get("long") == long.encode()


def test_get_and_wait_wait_until_another_rank_has_set_the_key(store: Any, hvd: ModuleType) -> None:
    last = hvd.size() - 1
    if hvd.rank() == last:
        time.sleep(0.1)
        store.set("late", "there")
        store.set("later", "there")
    store.wait(["late", "later"])
    store.wait(["late", "later"], timedelta(seconds=30))
    assert store.get("late") == b"there"
    assert store.check(["late", "later"])
    assert not store.check(["late", "never"])


def test_add_counts_over_all_ranks(store: Any, hvd: ModuleType) -> None:
    for _ in range(50):
        store.add("count", 2)
    store.barrier("counted", hvd.size())
    assert store.add("count", 0) == 100 * hvd.size()
    assert store.get("count") == str(100 * hvd.size()).encode()


def test_add_to_what_is_no_number_says_so(hvd: ModuleType) -> None:
    store = MpiStore()
    store.set("word", "seven")
    with pytest.raises(UsageError, match=r"MpiStore\.add on rank \d: .* is not a number but b'seven'"):
        store.add("word", 1)


def test_compare_set_changes_a_value_once(store: Any, hvd: ModuleType) -> None:
    assert store.compare_set(f"new{hvd.rank()}", "other", "mine") == b"other"
    assert not store.check([f"new{hvd.rank()}"])
    winner = store.compare_set("winner", "", str(hvd.rank()))
    assert store.get("winner") == winner
    store.barrier("won", hvd.size())
    assert store.compare_set("winner", winner.decode(), "nobody") == b"nobody"


def test_keys_are_counted_and_deleted(store: Any, hvd: ModuleType) -> None:
    store.set(f"key{hvd.rank()}", "")
    store.wait([f"key{rank}" for rank in range(hvd.size())])
    assert store.num_keys() == hvd.size()
    if isinstance(store, MpiStore):
        assert sorted(store.list_keys()) == [f"key{rank}" for rank in range(hvd.size())]
    hvd.barrier()
    assert store.delete_key(f"key{hvd.rank()}")
    assert not store.delete_key(f"key{hvd.rank()}")


def test_several_keys_at_once(store: Any, hvd: ModuleType) -> None:
    assert store.has_extended_api()
    if hvd.rank() == hvd.size() - 1:
        store.multi_set(["one", "two"], ["1", "2"])
        store.append("two", "2")
        store.set("done", "")
    store.wait(["done"])
    assert store.multi_get(["two", "one"]) == [b"22", b"1"]


def test_queues(hvd: ModuleType) -> None:
    store = MpiStore()
    store.queue_push(f"queue{hvd.rank()}", "first")
    store.queue_push(f"queue{hvd.rank()}", "second")
    other = f"queue{(hvd.rank() + 1) % hvd.size()}"
    assert store.queue_pop(other) == b"first"
    assert store.queue_pop(other) == b"second"
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop(other, block=False)
    assert store.queue_len(other) == 0


CALLS: list[Callable[[Any], object]] = [
    lambda store: store.get("never"),
    lambda store: store.wait(["set", "never"], SHORT),
    lambda store: store.multi_get(["set", "never"]),
]


@pytest.mark.parametrize("call", CALLS, ids=["get", "wait", "multi_get"])
def test_a_wait_ends_with_its_timeout_and_names_the_keys(
    store: Any, hvd: ModuleType, call: Callable[[Any], object]
) -> None:
    store.set("set", "")
    store.set_timeout(SHORT)
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"on rank \d: wait timeout after 200ms, nobody has set .*never"):
        call(store)
    assert time.monotonic() < began + 10
    assert store.timeout == SHORT
    # The table has forgotten the call, and goes on.
    store.set_timeout(timedelta(seconds=30))
    store.barrier("after", hvd.size())


def test_many_threads_of_a_rank_call(hvd: ModuleType) -> None:
    store = MpiStore()

    def pass_on(thread: int) -> None:
        for turn in range(20):
            store.set(f"{hvd.rank()}/{thread}/{turn}", str(turn))
            assert store.get(f"{(hvd.rank() + 1) % hvd.size()}/{thread}/{turn}") == str(turn).encode()
        store.add("ended", 1)

    threads = [threading.Thread(target=pass_on, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.barrier("all", hvd.size())
    assert store.add("ended", 0) == 4 * hvd.size()


def test_stores_know_nothing_of_each_other(hvd: ModuleType) -> None:
    first, second = MpiStore(), MpiStore()
    first.set("key", "of the first")
    assert not second.check(["key"])


def test_gloo_starts_over_it(hvd: ModuleType) -> None:
    dist.init_process_group("gloo", store=MpiStore(), rank=hvd.rank(), world_size=hvd.size())
    try:
        answers: list[Any] = [None] * hvd.size()
        dist.all_gather_object(answers, hvd.rank())
        assert answers == list(range(hvd.size()))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def ranks(hvd: ModuleType) -> Iterator[tuple[int, int]]:
    """torch.distributed, started over hvlike: this rank, and how many there are."""
    init_process_group()
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def test_it_is_the_default_group_and_starts_once(ranks: tuple[int, int], hvd: ModuleType) -> None:
    init_process_group()
    assert (hvd.rank(), hvd.size()) == ranks
    assert dist.get_backend() == "hvlike"


def test_another_backend_is_not_replaced(hvd: ModuleType) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="'gloo'"):
            init_process_group()
    finally:
        dist.destroy_process_group()

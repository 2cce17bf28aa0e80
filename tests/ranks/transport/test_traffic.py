"""What leaves a rank is counted: control messages by kind, data messages, calls of MPI's collectives, bytes."""

import math
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvlike.collectives.session.context import current
from hvlike.transport.messages.traffic import CountedComm, Sent, Traffic

pytestmark = [pytest.mark.differs_by_ranks(2, 4), pytest.mark.rests_on_mpi]


def sent_during(work: Any) -> Sent:
    before = current().fabric.traffic.snapshot()
    work()
    return current().fabric.traffic.snapshot() - before


def is_traffic_of_a_reduction(sent: int, tensor: int, size: int) -> bool:
    """Whether a rank that sent that many bytes may have reduced a tensor of that many bytes.

    Every rank sends its contributions to all shards but its own, and its own shard to all others; or all that it has
    to each other, or to one after the other: ranks that share cores may measure a network of high latency.
    """
    shares = 2 * (size - 1) / size, size - 1, math.log2(size)
    return min(abs(sent - share * tensor) for share in shares) <= 16 * size


def test_the_difference_of_two_moments_leaves_out_what_did_not_change() -> None:
    traffic = Traffic()
    traffic.control.update(["ready", "mailbox"])
    traffic.control_bytes += 15
    before = traffic.snapshot()
    traffic.control.update(["ready"])
    traffic.control_bytes += 7
    traffic.data_messages += 1
    traffic.data_bytes += 100
    traffic.count_collective(40)
    assert traffic.snapshot() - before == Sent({"ready": 1}, 7, 1, 100, 1, 40)
    assert before == Sent({"ready": 1, "mailbox": 1}, 15)
    assert before.control_messages == 2


def test_a_counted_communicator_counts_and_passes_on() -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        return arguments, named

    traffic = Traffic()
    comm = CountedComm(SimpleNamespace(Isend=refuse, Ibcast=refuse, Iallreduce=refuse, Get_rank=lambda: 3), traffic)
    array = np.zeros(10, np.float32)
    assert comm.Isend([array, "type"], 1, tag=5) == (([array, "type"], 1), {"tag": 5})
    assert comm.Ibcast([array, "type"], 2) == (([array, "type"], 2), {})
    assert comm.Iallreduce("in place", [array, 10, "type"], "sum") == (("in place", [array, 10, "type"], "sum"), {})
    assert comm.Get_rank() == 3
    assert traffic.snapshot() == Sent({}, 0, 1, 40, 2, 80)


@pytest.fixture
def alone_on_a_node(hvd: ModuleType) -> Iterator[None]:
    """Every rank on a node of its own."""
    hvd.shutdown()
    os.environ["HVLIKE_RANKS_PER_NODE"] = "1"
    hvd.init()
    yield
    hvd.shutdown()
    os.environ.pop("HVLIKE_RANKS_PER_NODE")
    hvd.init()


def test_named_operations_cost_messages_of_agreement(hvd: ModuleType) -> None:
    hvd.allreduce(torch.ones(10), name="x")
    sent = sent_during(lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(10), name="x")))
    if hvd.size() == 1:
        assert sent == Sent()
    elif hvd.rank() == 0:
        assert sent.control["responses"] == hvd.size() - 1
    else:
        assert sent.control["ready"] == 1
        assert sent.control_bytes > 0


@pytest.mark.mpi(min_size=2)
def test_data_on_one_node_is_no_message(hvd: ModuleType) -> None:
    sent = sent_during(lambda: hvd.allreduce(torch.ones(500_000)))
    assert (sent.data_messages, sent.collectives) == (0, 0)


@pytest.mark.mpi(min_size=2)
def test_data_between_nodes_is_counted_with_its_bytes(hvd: ModuleType, alone_on_a_node: None) -> None:
    size = hvd.size()
    sent = sent_during(lambda: hvd.allreduce(torch.ones(1 << 20)))
    assert sent.data_messages >= size - 1
    assert is_traffic_of_a_reduction(sent.data_bytes, 4 << 20, size)


@pytest.mark.mpi(min_size=2)
def test_small_reductions_are_counted_whoever_does_them(hvd: ModuleType, alone_on_a_node: None) -> None:
    sent = sent_during(lambda: hvd.allreduce(torch.ones(1000)))
    # MPI's own reduction, or messages where those are faster.
    assert sent.data_messages + sent.collectives > 0
    assert sent.data_bytes + sent.collective_bytes >= 4000


@pytest.mark.mpi(min_size=2)
def test_compressed_gradients_are_half_the_bytes(hvd: ModuleType, alone_on_a_node: None) -> None:
    def step(elements: int, compression: Any) -> Sent:
        parameter = torch.nn.Parameter(torch.zeros(elements))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=compression)

        def work() -> None:
            parameter.sum().backward()
            optimizer.synchronize()

        work()
        work()
        return sent_during(work)

    # Small ones of more than two nodes are MPI's own sums, in float32.
    for elements in (100, 50_000, 1_000_000) if hvd.size() == 2 else (1_000_000,):
        whole, half = step(elements, hvd.Compression.none), step(elements, hvd.Compression.bf16)
        # Half as many bytes may be sent in another way.
        assert is_traffic_of_a_reduction(whole.data_bytes, 4 * elements, hvd.size())
        assert is_traffic_of_a_reduction(half.data_bytes, 2 * elements, hvd.size())

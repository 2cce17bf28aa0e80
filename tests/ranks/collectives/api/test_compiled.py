"""Collectives in a function under torch.compile: each is run as it is, between graphs; fullgraph=True is refused."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.compiled import entered_by_marked_doors, nothing_of_hvlike_is_compiled
from torch import Tensor

import hvlike as hvd_
from hvlike.untraced import REASON

pytestmark = pytest.mark.filterwarnings("ignore")  # What torch.compile warns about its own doings


def exchange(x: Tensor) -> list[Tensor]:
    doubled = hvd_.allreduce(x * 2, name="doubled")
    handle = hvd_.allreduce_async(doubled + 1)
    rows = hvd_.allgather(doubled[:1])
    hvd_.broadcast_(doubled, 0)
    first, second = hvd_.grouped_allreduce([x, doubled])
    mine = hvd_.reducescatter(torch.cat([x] * hvd_.size()))
    theirs = hvd_.alltoall(torch.cat([x] * hvd_.size()))
    sparse = hvd_.sparse_allreduce_async(torch.eye(2).to_sparse())
    hvd_.barrier()
    return [hvd_.synchronize(handle), rows, doubled, first, second, mine, theirs, sparse().to_dense()]


def differentiate(x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    total = hvd_.allreduce((leaf * leaf).sum(), op=hvd_.Sum)
    total.backward()
    assert leaf.grad is not None
    return [total.detach(), leaf.grad]


@pytest.mark.parametrize("function", [exchange, differentiate])
def test_between_graphs(hvd: ModuleType, function: Any) -> None:
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")
    with nothing_of_hvlike_is_compiled() as seen:
        compiled = torch.compile(function, backend="eager")
        for rows in (2, 3, 4, 4):
            x = torch.arange(3.0 * rows).view(rows, 3) + hvd.rank()
            with entered_by_marked_doors():
                wanted = function(x)
            for got, expected in zip(compiled(x), wanted, strict=True):
                torch.testing.assert_close(got, expected)
        assert seen


def test_a_whole_graph_is_refused(hvd: ModuleType) -> None:
    if hvd.size() > 2:
        pytest.skip("compiled on up to two ranks")
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    parallel = hvd.nn.DistributedDataParallel(torch.nn.Linear(3, 3))
    for function in (hvd_.allreduce, parallel, lambda x: optimizer.synchronize(), lambda x: hvd_.broadcast(x, 0)):
        with nothing_of_hvlike_is_compiled(), pytest.raises(Exception) as raised:
            torch.compile(lambda x, call=function: call(x), backend="eager", fullgraph=True)(torch.ones(2, 3))
        assert REASON in str(raised.value), str(raised.value)


def test_what_asks_for_the_place_of_a_rank_is_part_of_a_graph(hvd: ModuleType) -> None:
    everybody = hvd.global_process_set
    with nothing_of_hvlike_is_compiled():
        compiled = torch.compile(
            lambda x: x * hvd_.size() + hvd_.rank() + everybody.size(), backend="eager", fullgraph=True
        )
        assert compiled(torch.ones(2)).tolist() == [2 * hvd.size() + hvd.rank()] * 2

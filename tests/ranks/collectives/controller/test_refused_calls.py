"""Wrong arguments: an error on the rank that passed them, before anything is sent; the next call is right."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike import allgather
from hvlike.errors import DuplicateNameError, UsageError

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]

REFUSED: dict[str, tuple[Callable[[ModuleType], Any], str]] = {
    "no such op": (
        lambda hvd: hvd.allreduce(torch.ones(2), op=99),
        "op 99 is not a reduction; expected one of: Average",
    ),
    "average and op": (
        lambda hvd: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum),
        "The op parameter supersedes average. Please provide only one of them.",
    ),
    "Adasum of integers": (
        lambda hvd: hvd.allreduce(torch.ones(2).int(), name="g", op=hvd.Adasum),
        "op Adasum is not defined on dtype int32; expected float16, bfloat16, float32 or float64.",
    ),
    "Average of bool": (
        lambda hvd: hvd.allreduce(torch.ones(2).bool(), name="mask"),
        "allreduce 'mask' with op Average: op Average is not defined on dtype bool",
    ),
    "Max of complex": (
        lambda hvd: hvd.allreduce(torch.ones(2, dtype=torch.complex64), name="z", op=hvd.Max),
        "allreduce 'z' with op Max: op Max is not defined on dtype complex64",
    ),
    "factors of bool": (
        lambda hvd: hvd.allreduce_(torch.ones(2).bool(), op=hvd.Sum, prescale_factor=2),
        "on bool takes no factors",
    ),
    "factor that is no number": (
        lambda hvd: hvd.allreduce(torch.ones(2), name="g", prescale_factor=float("nan")),
        "allreduce 'g': expected numbers as factors, got prescale_factor=nan",
    ),
    "infinite factor of integers": (
        lambda hvd: hvd.allreduce(torch.ones(2).int(), op=hvd.Sum, postscale_factor=float("inf")),
        "expected finite factors for int32",
    ),
    "no compressor": (
        lambda hvd: hvd.grouped_reducescatter([torch.ones(8)], compression="fp16"),
        "compression must have the methods compress(tensor)",
    ),
    "unsupported dtype": (
        lambda hvd: hvd.allreduce(torch.ones(2).to(torch.float8_e5m2), name="w"),
        "allreduce 'w': dtype float8_e5m2 cannot be communicated; expected one of: uint8",
    ),
    "unsupported dtype in broadcast": (
        lambda hvd: hvd.broadcast(torch.ones(2).to(torch.uint16), 0, name="w"),
        "broadcast 'w': dtype uint16 cannot be communicated",
    ),
    "sparse": (
        lambda hvd: hvd.allreduce(torch.eye(3).to_sparse(), name="embedding"),
        "allreduce 'embedding': expected a dense tensor, got layout torch.sparse_coo",
    ),
    "sparse in broadcast": (lambda hvd: hvd.broadcast(torch.eye(3).to_sparse(), 0), "expected a dense tensor"),
    "no tensor": (
        lambda hvd: hvd.allreduce([1.0, 2.0], name="list"),
        "allreduce 'list': expected a torch.Tensor, got list.",
    ),
    "no tensor in broadcast": (lambda hvd: hvd.broadcast_(3, 0), "expected a torch.Tensor, got int."),
    "no tensor in allgather": (lambda hvd: allgather(None), "expected a torch.Tensor, got NoneType."),
    "no tensor in a group": (
        lambda hvd: hvd.grouped_allreduce([torch.ones(2), 7], name="layer"),
        "grouped_allreduce 'layer' (tensor 1): expected a torch.Tensor, got int.",
    ),
    "meta tensor": (lambda hvd: hvd.allreduce(torch.ones(2, device="meta")), "got a meta tensor of shape [2]"),
    "empty group": (
        lambda hvd: hvd.grouped_allreduce([]),
        "grouped_allreduce: expected at least one tensor, got an empty list.",
    ),
    "root outside": (
        lambda hvd: hvd.broadcast(torch.ones(2), root_rank=700, name="w"),
        "broadcast received invalid root rank 700 for provided process set: 'w'",
    ),
    "negative root": (lambda hvd: hvd.broadcast_(torch.ones(2), root_rank=-1), "invalid root rank -1"),
    "expanded tensor in place": (
        lambda hvd: hvd.allreduce_(torch.ones(1, 3).expand(2, 3), name="g"),
        "allreduce 'g': several elements of this tensor of shape [2, 3] and strides [0, 1] share one place in memory",
    ),
    "expanded tensor in a broadcast": (
        lambda hvd: hvd.broadcast_(torch.ones(()).expand(4), 0),
        "cannot be written in place. Pass tensor.contiguous()",
    ),
    "unregistered process set": (
        lambda hvd: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0])),
        "Allreduce: Process set provided does not exist, or has not been registered",
    ),
    "no process set": (
        lambda hvd: hvd.barrier(process_set=[0]),
        "Barrier: expected a ProcessSet, got list.",
    ),
    "number of splits": (
        lambda hvd: hvd.alltoall(torch.ones(9), splits=[0] * (hvd.size() + 1), name="x"),
        "alltoall 'x': Number of entries in splits does not equal number of workers. Got",
    ),
    "sum of splits": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=[4] * hvd.size(), name="x"),
        "Sum of splits entries is greater than the first dimension of tensor. Got [4",
    ),
    "negative splits": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=[-1] + [1] * (hvd.size() - 1)),
        "expected no negative entry in splits, got [-1",
    ),
    "float splits": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=[1.0] * hvd.size()),
        "alltoall expects splits to contain 32-bit integer elements, or 64-bit ones; got [1.0",
    ),
    "float tensor of splits": (
        lambda hvd: hvd.alltoall_async(torch.ones(3), splits=torch.ones(hvd.size())),
        "alltoall expects splits to contain 32-bit integer elements, or 64-bit ones, in one dimension; got torch.float",
    ),
    "splits of two dimensions": (
        lambda hvd: hvd.alltoall(torch.ones(3), splits=torch.zeros(hvd.size(), 1, dtype=torch.int32)),
        "in one dimension; got torch.int32 of shape",
    ),
    "0-dim alltoall": (
        lambda hvd: hvd.alltoall(torch.tensor(1.0), splits=[0] * hvd.size(), name="x"),
        "alltoall 'x': expected at least one dimension, got shape []",
    ),
    "0-dim reducescatter": (
        lambda hvd: hvd.reducescatter(torch.tensor(1.0), name="x"),
        "reducescatter 'x': Reducescatter does not support scalar inputs",
    ),
    "0-dim in a group": (
        lambda hvd: hvd.grouped_reducescatter_async([torch.ones(2), torch.tensor(1.0)], name="x"),
        "grouped_reducescatter 'x' (tensor 1): Reducescatter does not support scalar inputs",
    ),
    "Adasum": (
        lambda hvd: hvd.reducescatter(torch.ones(2), op=hvd.Adasum, name="x"),
        "reducescatter 'x': op Adasum is not defined on rows; possible: Average",
    ),
    "empty group of gathers": (
        lambda hvd: hvd.grouped_allgather([]),
        "grouped_allgather: expected at least one tensor, got an empty list.",
    ),
    "empty group of reductions": (
        lambda hvd: hvd.grouped_reducescatter([]),
        "grouped_reducescatter: expected at least one tensor, got an empty list.",
    ),
    "dense tensor in a sparse reduction": (
        lambda hvd: hvd.sparse_allreduce_async(torch.ones(2), name="x"),
        "sparse_allreduce 'x': expected a sparse COO tensor, got layout torch.strided",
    ),
    "Max of sparse tensors": (
        lambda hvd: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="x", op=hvd.Max),
        "sparse_allreduce 'x': op Max is not defined on sparse tensors; possible: Average, Sum.",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_refused_with_a_reason(
    hvd: ModuleType, case: tuple[Callable[[ModuleType], Any], str]
) -> None:
    call, text = case
    with pytest.raises(UsageError) as raised:
        call(hvd)
    assert isinstance(raised.value, ValueError)
    assert text in str(raised.value)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_a_name_in_flight_is_refused(hvd: ModuleType) -> None:
    # Of two ranks and more, one has not asked yet, so that the name is surely in flight.
    late = hvd.rank() == hvd.size() - 1
    if late and hvd.size() > 1:
        hvd.barrier()
    first = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    if not late:
        with pytest.raises(DuplicateNameError, match=rf"same name as another tensor.*'twice' on rank {hvd.rank()}"):
            hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        # Another kind may use the name.
        other = hvd.broadcast_async(torch.ones(2), 0, name="twice")
        hvd.barrier()
    else:
        other = hvd.broadcast_async(torch.ones(2), 0, name="twice")
    hvd.synchronize(other)
    assert hvd.synchronize(first).tolist() == [hvd.size()] * 2
    again = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert hvd.synchronize(again).tolist() == [hvd.size()] * 2


@pytest.mark.mpi(min_size=2)
def test_rows_that_cannot_be_divided(hvd: ModuleType) -> None:
    text = "splits not provided, but first dimension of tensor is not an even multiple of the number of workers"
    with pytest.raises(ValueError, match=text):
        hvd.alltoall(torch.ones(hvd.size() + 1))
    assert hvd.alltoall(torch.full((hvd.size(),), hvd.rank())).tolist() == list(range(hvd.size()))


WRONG: dict[str, Callable[[ModuleType], Any]] = {
    "got list": lambda hvd: hvd.allreduce([1]),
    "got int": lambda hvd: hvd.broadcast(3, root_rank=0),
    "expected numbers, got prescale_factor='a'": lambda hvd: hvd.allreduce(torch.ones(2), prescale_factor="a"),
    "expected numbers, got prescale_factor=1.0, postscale_factor=None": lambda hvd: hvd.reducescatter(
        torch.ones(4), postscale_factor=None
    ),
    "op 'sum' is not a reduction": lambda hvd: hvd.allreduce(torch.ones(2), op="sum"),
    "name has to be a string, got 3": lambda hvd: hvd.allgather(torch.ones(2), name=3),
    "expected a list of tensors, got int": lambda hvd: hvd.grouped_allreduce(7),
    "compress": lambda hvd: hvd.allreduce(torch.ones(2), compression=5),
    "expects a torch.optim.Optimizer, got Linear": lambda hvd: hvd.DistributedOptimizer(torch.nn.Linear(1, 1)),
    "expected a ProcessSet, got list": lambda hvd: hvd.allreduce(torch.ones(2), process_set=[0]),
    "expects tensors, got a module": lambda hvd: hvd.broadcast_parameters(torch.nn.Linear(1, 1), 0),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_type_is_a_type_error(hvd: ModuleType, text: str) -> None:
    with pytest.raises(TypeError, match=text) as raised:
        WRONG[text](hvd)
    assert isinstance(raised.value, ValueError)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()

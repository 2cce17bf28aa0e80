"""An inline allreduce gives what the ordinary way gives; whatever is not alike on all ranks takes that."""

import os
import signal
import subprocess
import time

import pytest
import torch
from support.collectives.inputs import DTYPES, OPS, contribution, defined, reduced, same
from support.pretended_nodes import nodes_of

from hvlike.collectives.controller.inline_calls import inline_allreduces
from hvlike.errors import MismatchError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.differs_by_ranks(2)]

CALLS = 80
"""More than are spared after refusals (MOST_SPARING)."""

MOST_CALLS = 2000
"""In so many one is served, however late the ranks of a busy machine are; all ranks count alike and end together."""

SMALL, MIDDLING, LARGE = (5, 7), (150, 1111), (1000, 1111)

FEW, MANY = 3, 60_000
"""Elements: of two ranks on nodes of their own MANY travel in halves, the first of which follows the offer."""

WAITS = {"_wait", "_agree", "synchronize"}
"""Functions in which a call waits for the other ranks: on a board, for messages, negotiated."""

OF_EACH_KIND = (torch.bool, torch.int32, torch.bfloat16, torch.float32, torch.complex128)
"""Of numbers: what tensors of some size are tried with."""


@pytest.fixture(params=[None, 1], ids=["node", "nodes"], scope="module", autouse=True)
def way(request, hvd):
    """All ranks on their node, and each on a pretended one of its own."""
    with nodes_of(hvd, request.param):
        yield


@pytest.fixture
def inline(hvd):
    """The inline allreduce of all ranks, open and not waiting after refusals."""
    for _ in range(MOST_CALLS):
        way = inline_allreduces.by_set.get(0)
        before = 0 if way is None else way.served
        hvd.allreduce_(torch.zeros(3), name="to open the inline allreduce")
        if way is not None and way.served > before:
            return way
    if hvd.local_size() in (1, hvd.size()):
        pytest.fail("the inline allreduce is never taken")
    pytest.skip("the ranks are on several nodes")


# Three ranks on two busy cores: most calls are spared then.
@pytest.mark.timeout(300)
@pytest.mark.in_turn(16)
@pytest.mark.parametrize("shape", [SMALL, MIDDLING, LARGE], ids=["small", "middling", "large"])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_results_are_those_of_the_ordinary_way(hvd, inline, op, shape):
    if shape is LARGE and hvd.size() > 2:
        pytest.skip("large ones take long where most are spared; two ranks do them, and more have the same bits")
    least = 2 if shape is LARGE else 4
    for dtype in (each for each in (DTYPES if shape is SMALL else OF_EACH_KIND) if defined(op, each)):
        inputs = [contribution(rank, shape, dtype) for rank in range(hvd.size())]
        narrow_mean = op is hvd.Average and dtype in (torch.uint8, torch.int8, torch.int16)
        expected = reduced(op, inputs)
        before = inline.served
        for attempt in range(MOST_CALLS):
            tensor = inputs[hvd.rank()].clone()
            assert hvd.allreduce_(tensor, op=op, name=f"inline {dtype}") is tensor
            same(tensor, expected)
            # With more ranks than cores one may be late, and then some calls are spared.
            if attempt + 1 >= least and (narrow_mean or inline.served > before):
                break
        assert (inline.served > before) is not narrow_mean, dtype


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [SMALL, MIDDLING, LARGE], ids=["small", "middling", "large"])
def test_results_have_the_same_bits_as_on_the_ordinary_way(hvd, inline, shape, dtype):
    torch.manual_seed(hvd.rank())
    original = torch.randn(shape).to(dtype)
    ordinary = hvd.synchronize(hvd.allreduce_async(original, name="bits"))
    for _ in range(3):
        assert torch.equal(hvd.allreduce_(original.clone(), name="bits"), ordinary)


def test_unnamed_calls_take_it_too_and_keep_their_numbers(hvd, inline):
    before = inline.served
    for step in range(MOST_CALLS):
        mine = torch.full((4,), float(step))
        assert hvd.allreduce_(mine, op=hvd.Sum).tolist() == [float(step * hvd.size())] * 4
        if step % 10 == hvd.rank():
            time.sleep(0.002)
        if step >= CALLS and inline.served > before:
            break
    assert inline.served > before
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_late_rank_takes_part_on_the_ordinary_way(hvd, inline, count):
    for late in (False, True):
        if late and hvd.rank() == hvd.size() - 1:
            time.sleep(0.2)
        assert hvd.allreduce_(torch.ones(count), op=hvd.Sum, name="late").eq(hvd.size()).all()


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_what_is_interrupted_while_it_waits_has_been_asked_for(hvd, inline, shape):
    """As where a negotiated call is interrupted: the others get their results."""

    def interrupt(number, frame):
        # On a busy machine the call may not have begun.
        while frame is not None and frame.f_code.co_name not in WAITS:
            frame = frame.f_back
        if frame is not None:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.005)

    for _ in range(2):
        # A kind of calls is known once it was negotiated.
        hvd.allreduce_(torch.ones(shape), op=hvd.Sum, name="known")
    hvd.barrier()
    tensor = torch.full(shape, float(hvd.rank()))
    if hvd.rank() == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(KeyboardInterrupt):
                hvd.allreduce_(tensor, op=hvd.Sum, name="interrupted")
        finally:
            signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(0.3)
        hvd.allreduce_(tensor, op=hvd.Sum, name="interrupted")
    # Operations are done in the order in which they are agreed on.
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="after it"))
    same(tensor, torch.full(shape, float(sum(range(hvd.size())))))
    for _ in range(CALLS):
        assert hvd.allreduce_(torch.ones(FEW), op=hvd.Sum).tolist() == [float(hvd.size())] * FEW


def test_a_rank_that_is_held_up_is_no_deadlock(hvd, inline):
    """It hears how long the others have waited before it sees what rank 1 offers, and has not answered that."""
    tensor = torch.full((3,), float(hvd.rank()))
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(0.2)
        hvd.allreduce_(tensor, name="held up")
    else:
        handle = hvd.allreduce_async_(tensor, name="held up")
        hold = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 1.2; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", hold if hvd.rank() == 0 else "true"]):
            hvd.synchronize(handle)
    same(tensor, torch.full((3,), (hvd.size() - 1) / 2))


@pytest.mark.parametrize("count", [FEW, MANY])
def test_ranks_with_other_orders_get_their_results(hvd, inline, count):
    names = [f"order {index}" for index in range(hvd.size())]
    for repetition in range(10):
        first = names[(hvd.rank() + repetition) % len(names)]
        handles = {
            name: hvd.allreduce_async_(torch.full((count,), float(index)), op=hvd.Sum, name=name)
            for index, name in enumerate(names)
            if name != first
        }
        index = names.index(first)
        total = hvd.allreduce_(torch.full((count,), float(index)), op=hvd.Sum, name=first)
        assert total.eq(index * hvd.size()).all()
        for name, handle in handles.items():
            assert hvd.synchronize(handle).eq(names.index(name) * hvd.size()).all()


@pytest.mark.parametrize(("count", "other"), [(6, 7), (MANY, MANY + 1), (MANY, FEW)], ids=str)
def test_other_shapes_are_an_error_on_all_ranks_and_it_goes_on(hvd, inline, count, other):
    for _ in range(5):
        hvd.allreduce_(torch.ones(count), name="shape")
        hvd.allreduce_(torch.ones(other), name="shape")
    with pytest.raises(MismatchError, match="shape"):
        hvd.allreduce_(torch.ones(count if hvd.rank() else other), name="shape")
    before = inline.served
    for step in range(MOST_CALLS):
        # What was sent for the refused call is in no later one.
        assert hvd.allreduce_(torch.full((count,), float(step)), name="shape").eq(step).all()
        if step >= CALLS and inline.served > before:
            break
    assert inline.served > before


def test_other_ops_are_an_error_on_all_ranks(hvd, inline):
    for op in (hvd.Sum, hvd.Max) * 3:
        hvd.allreduce_(torch.ones(6), op=op, name="op")
    with pytest.raises(MismatchError, match="Sum"):
        hvd.allreduce_(torch.ones(6), op=hvd.Max if hvd.rank() else hvd.Sum, name="op")


def test_it_goes_on_after_a_join(hvd, inline):
    for step in range(1 + hvd.rank()):
        hvd.allreduce_(torch.ones(4), op=hvd.Sum, name=f"until {step}")
    hvd.join()
    before = inline.served
    for step in range(MOST_CALLS):
        assert hvd.allreduce_(torch.ones(4), op=hvd.Sum, name="until 0").tolist() == [float(hvd.size())] * 4
        if step >= CALLS and inline.served > before:
            break
    assert inline.served > before


def test_special_tensors_are_reduced_right(hvd, inline):
    for _ in range(4):
        hvd.allreduce_(torch.ones(4, 6), op=hvd.Sum, name="special")
    transposed = torch.ones(6, 4).t()
    parameter = torch.nn.Parameter(torch.ones(4, 6))
    strided = torch.ones(4, 12)[:, ::2]
    with torch.inference_mode():
        inference = torch.ones(4, 6)
    for tensor in (transposed, parameter, strided, inference):
        result = hvd.allreduce_(tensor, op=hvd.Sum, name="special")
        assert result is tensor
        assert bool((tensor == hvd.size()).all())


def test_sums_that_overflow_warn_of_nothing(hvd, inline):
    for _ in range(4):
        total = hvd.allreduce_(torch.full((4,), 3e38), op=hvd.Sum, name="overflow")
        assert bool(total.isinf().all())


def test_reduced_tensors_of_process_sets(hvd):
    if hvd.size() < 3:
        pytest.skip("needs a set that is not everybody")
    members = hvd.add_process_set([0, hvd.size() - 1])
    try:
        if members.included():
            for _ in range(8):
                assert hvd.allreduce_(torch.ones(3), op=hvd.Sum, name="set", process_set=members)[0] == 2
            way = inline_allreduces.by_set.get(members.process_set_id)
            assert way is None or way.served > 0
    finally:
        hvd.remove_process_set(members)

"""Gradients: what a rank contributes and gets back, which buckets start early, their sizes, how a pass ends."""

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hvlike.backends.fusion_buffer import SMALL_BYTES
from hvlike.collectives.requests.plan import BucketSizes, Plan
from hvlike.training.autotune import BUCKET_BYTES, StepSampler, fastest, make_candidates
from hvlike.training.ddp.end_of_backward import Collected, ModulePass, collecting, collection, next_number, next_turn
from hvlike.training.gradients.contributions import contributions, lacking, look_at, take_back
from hvlike.training.gradients.early_starts import SLOW_STEPS, EarlyStarts, Mover, choose_mover
from hvlike.training.gradients.grad_state import GradState
from hvlike.training.gradients.planned_queue import Packing
from hvlike.transport.host import topology


def slot_of(
    gradient: Tensor | None, *, arrived: Tensor | None = None, index: int = 0, name: str = "weight"
) -> GradState:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = gradient
    slot = GradState(name, parameter, index)
    slot.handed_over = arrived
    return slot


def test_all_that_has_arrived_is_reduced_where_it_is() -> None:
    gradients = [torch.ones(2), torch.ones(2)]
    slots = [slot_of(gradient, arrived=gradient) for gradient in gradients]
    arrived = look_at(slots, [slot.parameter for slot in slots], [])
    assert arrived.gradients is not None
    assert all(found is gradient for found, gradient in zip(arrived.gradients, gradients, strict=True))
    assert not arrived.were_touched
    assert not arrived.were_exchanged


def test_a_gradient_that_has_not_arrived_is_none_of_an_error() -> None:
    slots = [slot_of(None), slot_of(torch.ones(2))]
    arrived = look_at(slots, [slot.parameter for slot in slots], [])
    assert arrived.gradients is None
    assert not arrived.were_exchanged
    assert not arrived.were_touched


def test_a_rank_contributes_what_has_arrived_else_sums_else_zeros() -> None:
    arrived, sums = torch.full((2,), 3.0), torch.full((2,), 5.0)
    slots = [slot_of(None, arrived=arrived), slot_of(sums, index=1), slot_of(None, index=2)]
    assert lacking(slots, ()) == [2]
    found = contributions(slots, (), densify=False)
    assert found[0] is arrived
    assert found[1] is sums
    assert found[2].tolist() == [0, 0]
    take_back(slots, {}, absent=[])
    # The first one was set to None by the program, and the last one has what stood for it.
    assert [slot.parameter.grad for slot in slots] == [None, sums, found[2]]


def test_what_no_rank_has_keeps_what_it_has() -> None:
    slot = slot_of(None)
    contributions([slot], (), densify=False)
    take_back([slot], {}, absent=[0])
    assert slot.parameter.grad is None


def test_a_gradient_that_no_pass_has_used_is_copied_and_counts_as_nothing() -> None:
    gradient = torch.ones(2)
    slot = slot_of(gradient)
    assert lacking([slot], {slot}) == [0]
    (copy,) = contributions([slot], {slot}, densify=False)
    assert copy is not gradient
    assert copy.tolist() == [1, 1]
    take_back([slot], {}, absent=[])
    assert slot.parameter.grad is copy


def test_sparse_gradients_go_dense_and_come_back_sparse() -> None:
    gradient = torch.ones(2).to_sparse()
    slot = slot_of(gradient, arrived=gradient)
    (wire,) = contributions([slot], (), densify=True)
    assert wire.layout is torch.strided
    wire.mul_(2)
    take_back([slot], {}, absent=[])
    assert slot.parameter.grad is not None
    assert slot.parameter.grad.is_sparse
    assert slot.parameter.grad.to_dense().tolist() == [2, 2]


def plan_of(*buckets: tuple[int, ...], sparse: tuple[int, ...] = ()) -> Plan:
    return Plan(buckets, (None,) * sum(map(len, buckets)), sparse)


def following(plan: Plan, mover: Mover = Mover.LOOP, *, automatic: bool = False) -> EarlyStarts:
    early = EarlyStarts(mover, automatic=automatic, several_nodes=True)
    early.follow(plan)
    return early


def mark(early: EarlyStarts, index: int) -> list[int]:
    """The buckets that start when entry `index` is ready."""
    bucket = early.bucket_of(index)
    return [] if bucket is None else list(early.ready(bucket))


@pytest.mark.parametrize(
    ("wanted", "spare_core", "on_device", "mover"),
    [
        (None, True, False, Mover.LOOP),
        (None, False, False, Mover.NOTHING),
        (True, True, False, Mover.LOOP),
        (False, False, False, Mover.NOTHING),
        (None, False, True, Mover.DEVICE),
        (True, True, True, Mover.DEVICE),
        (False, False, True, Mover.NOTHING),
    ],
)
def test_a_device_needs_no_core_and_what_is_set_counts(
    wanted: bool | None, spare_core: bool, on_device: bool, mover: Mover
) -> None:
    assert choose_mover(wanted, spare_core=spare_core, on_device=on_device) is mover


def test_a_bucket_starts_when_it_and_all_before_it_are_complete() -> None:
    early = following(plan_of((3, 2), (1,), (0, 4)))
    assert [mark(early, index) for index in (1, 3, 0, 2)] == [[], [], [], [0, 1]]
    assert mark(early, 4) == [2]
    assert list(early.start_rest()) == []


def test_what_has_not_started_is_the_rest_and_a_new_step_starts_anew() -> None:
    early = following(plan_of((0,), (1,), (2,)))
    for _ in range(2):
        assert mark(early, 0) == [0]
        assert list(early.start_rest()) == [1, 2]
        early.expect_all()


def test_with_sparse_tensors_the_last_bucket_waits_for_the_end() -> None:
    early = following(plan_of((0,), (1,), sparse=(2,)))
    assert [mark(early, index) for index in (2, 0, 1)] == [[], [0], []]
    assert list(early.start_rest()) == [1]


def test_nothing_starts_without_a_plan_or_a_mover() -> None:
    early = following(plan_of((0,)))
    early.follow(None)
    assert early.bucket_of(0) is None
    assert list(early.start_rest()) == []
    assert following(plan_of((0,)), Mover.NOTHING).bucket_of(0) is None


@pytest.mark.parametrize("automatic", [True, False])
def test_a_core_that_is_not_spare_any_more_moves_nothing_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch, automatic: bool
) -> None:
    monkeypatch.setattr(topology, "runnable_threads", lambda: 1 << 20)
    early = following(plan_of((0,), (1,)), automatic=automatic)
    for _ in range(topology.FIRST_LOOKS + 1):
        mark(early, 0)
        early.expect_all()
    assert early.mover is (Mover.NOTHING if automatic else Mover.LOOP)


@pytest.mark.parametrize(
    ("slow", "mover"),
    [
        ([True] * SLOW_STEPS, Mover.HOOKS),
        ([True] * (SLOW_STEPS - 1) + [False, True], Mover.NOTHING),
    ],
)
def test_on_a_network_that_stays_slow_the_hooks_move_buckets(slow: list[bool], mover: Mover) -> None:
    early = following(plan_of((0,), (1,)), Mover.NOTHING, automatic=True)
    for each in slow:
        early.note_speed(slow=each)
    assert early.mover is mover


def test_one_bucket_or_what_the_user_has_set_is_not_moved_by_hooks() -> None:
    for early in (
        following(plan_of((0, 1)), Mover.NOTHING, automatic=True),
        following(plan_of((0,), (1,)), Mover.NOTHING),
    ):
        for _ in range(2 * SLOW_STEPS):
            early.note_speed(slow=True)
        assert early.mover is Mover.NOTHING


def test_small_tensors_of_one_owner_and_dtype_share_a_piece() -> None:
    large = torch.arange(SMALL_BYTES // 2, dtype=torch.float32).reshape(2, -1).t()
    tensors = [torch.tensor(3), torch.ones(2, 3), large, torch.full((4,), 2.0), torch.empty(0)]
    packing = Packing(tensors, [0, 0, 1, 1, 0])
    operands = packing.pack(tensors)
    assert packing.owners == [0, 0, 1, 1]
    assert [operand.flat.numel() for operand in operands] == [1, 6, 4, SMALL_BYTES // 2]


def test_pieces_of_other_owners_are_left_alone() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    packing = Packing(tensors, [0, 1])
    operands = packing.pack(tensors)
    for operand in operands:
        operand.flat.fill_(5)
    packing.unpack(tensors, operands, [1])
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [5, 5]]


def test_only_the_own_small_tensors_are_copied() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    packing = Packing(tensors, [0, 1])
    first, second = packing.pack(tensors)
    tensors[0].fill_(2)
    tensors[1].fill_(2)
    packing.pack(tensors, owner=1)
    assert first.flat.tolist() == [1, 1]
    assert second.flat.tolist() == [2, 2]


def test_other_shapes_and_dtypes_do_not_fit() -> None:
    packing = Packing([torch.ones(2)], [0])
    assert packing.fits([torch.zeros(2)])
    assert not packing.fits([torch.zeros(3)])
    assert not packing.fits([torch.zeros(2, dtype=torch.float64)])
    assert not packing.fits([])


class Module:
    """What ModuleGradients does with its passes."""

    def __init__(self, number: int, ended: list[int]) -> None:
        self.number = number
        self.running: ModulePass | None = None
        self._ended = ended

    def arm(self, _: Tensor) -> None:
        """A hook of an output."""
        if self.running is None or not self.running.sees(None):
            self.running = ModulePass(None)
            self.running.call_at_end(self.number, self.end)

    def end(self) -> None:
        self._ended.append(self.number)


def backward(*modules: Module, fail: Callable[[Tensor], None] | None = None) -> None:
    weight = torch.ones(2, requires_grad=True)
    if fail is not None:
        weight.register_hook(fail)
    output = weight * 2
    for module in modules:
        output.register_hook(module.arm)
    output.sum().backward()


def test_a_pass_ends_once() -> None:
    ended: list[int] = []
    module = Module(1, ended)
    running = []
    backward(module, fail=lambda _: running.append(module.running is not None and module.running.armed))
    assert running == [True]
    assert ended == [1]
    assert module.running is not None
    assert not module.running.armed


def test_a_pass_that_fails_is_not_armed_any_more() -> None:
    ended: list[int] = []
    module = Module(1, ended)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("of the program")

    with pytest.raises(ArithmeticError):
        backward(module, fail=fail)
    assert module.running is not None
    assert not module.running.armed
    assert not module.running.sees(None)
    backward(module)
    assert ended == [1]


def test_modules_end_in_the_order_of_their_numbers_whichever_was_armed_first() -> None:
    first, second = next_number(), next_number()
    assert first < second
    assert next_turn() > next_turn()
    for numbers in ((first, second), (second, first)):
        ended: list[int] = []
        backward(*(Module(number, ended) for number in numbers))
        assert ended == [first, second]


def test_a_pass_in_parts_is_known_by_what_collects_them() -> None:
    collected = Collected({})
    running = ModulePass(collected)
    assert running.reduces
    assert running.sees(collected)
    assert not running.sees(Collected({}))
    assert not running.sees(None)


KEY = "hvlike.training.ddp.end_of_backward"


def test_a_pass_within_a_pass_has_its_own() -> None:
    outer, inner = Collected({}), Collected({})
    with collecting(outer):
        with collecting(inner):
            assert collection() is inner
        assert collection() is outer
    assert collection() is None


def test_references_are_counted() -> None:
    """Past bug: torch 2.5 drops a reference that it has not counted; the process died of that."""
    outer, inner = Collected({}), Collected({})
    before = sys.getrefcount(outer), sys.getrefcount(inner)
    for _ in range(10):
        with collecting(outer), collecting(inner):
            assert collection() is inner
        assert collection() is None
    assert (sys.getrefcount(outer), sys.getrefcount(inner)) == before


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch can only put things there")
def test_nothing_is_left_in_a_thread_for_its_end() -> None:
    """Past bug: torch drops a thread's objects after Python is done with it; at the end of the process that aborted."""
    left = []

    def run() -> None:
        with collecting(Collected({})):
            pass
        left.append(torch._C._is_key_in_tls(KEY))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert left == [False]


MIB = 1 << 20


def test_the_drawing_in_the_docstring() -> None:
    sampler = StepSampler(3)
    served = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    complete = [sampler.step_ended(count, float(now)) is not None for now, count in enumerate(served)]
    assert [now for now, ended in enumerate(complete) if ended] == [3, 6, 10]


def test_a_sample_is_the_median_of_its_steps() -> None:
    sampler = StepSampler(3)
    ends = [0.0, 1.0, 1.1, 9.0]
    assert [sampler.step_ended(served, now) for served, now in enumerate(ends, 1)] == [None, None, None, 1.0]


def test_what_happens_between_samples_is_not_counted() -> None:
    sampler = StepSampler(1)
    sampler.step_ended(1, 0.0)
    assert sampler.step_ended(2, 2.0) == 2.0
    sampler.resume(10.0)
    assert sampler.step_ended(3, 11.5) == 1.5


@pytest.mark.parametrize("start", [BucketSizes(8 * MIB, 8 * MIB), BucketSizes(4 * MIB, 4 * MIB), BucketSizes(9, 4)])
def test_the_sizes_in_use_come_first_and_none_comes_twice(start: BucketSizes) -> None:
    table = make_candidates(start)
    assert table[0] == start
    assert len(set(table)) == len(table)
    assert {each.bucket_bytes for each in table} == {start.bucket_bytes, *BUCKET_BYTES}


def test_a_first_bucket_that_is_smaller_stays_so() -> None:
    assert {each.first_bucket_bytes for each in make_candidates(BucketSizes(8 * MIB, 17))} == {17}
    assert all(each.first_bucket_bytes == each.bucket_bytes for each in make_candidates(BucketSizes(3, 3)))


def test_one_lucky_sample_does_not_win() -> None:
    first, second = [3.0, 1.0, 2.0], [3.0, 4.0, 2.0]
    assert fastest(first + second, 3) == 2

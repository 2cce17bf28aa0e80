"""The model behind bench simulate: its limits, and what grows with what."""

import math
from dataclasses import replace

import pytest
from support.bench.loggp_constants import CONSTANTS, WORK

from benchmarks import loggp
from benchmarks.loggp import Job

FREE = replace(CONSTANTS, latency=0.0, overhead=0.0, gap=0.0, fold=0.0)
"""A network of nothing but bandwidth."""
RANKS = [1, 2, 3, 8, 9, 64, 1000, 100_000]
ACROSS = [loggp.ring, loggp.tree, loggp.best]


@pytest.mark.parametrize("across", ACROSS)
def test_one_rank_reduces_for_nothing(across: loggp.Across) -> None:
    assert across(CONSTANTS, 1, 1e8, 1) == 0.0


@pytest.mark.parametrize("name", loggp.AGREEMENTS)
@pytest.mark.parametrize("reduction", loggp.REDUCTIONS)
def test_one_rank_has_only_its_computation(name: str, reduction: str) -> None:
    assert loggp.step(CONSTANTS, Job(1, 8), WORK, name, reduction) == WORK.compute


@pytest.mark.parametrize("across", ACROSS)
def test_more_ranks_and_more_bytes_never_cost_less(across: loggp.Across) -> None:
    times = [across(CONSTANTS, n, 1e6, 1) for n in RANKS]
    assert times == sorted(times)
    times = [across(CONSTANTS, 64, nbytes, 1) for nbytes in (0, 1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert across(CONSTANTS, 64, 1e6, 1) <= across(CONSTANTS, 64, 1e6, 8)


@pytest.mark.parametrize("across", [loggp.ring, loggp.best])
def test_with_bandwidth_alone_every_byte_passes_a_link_about_twice(across: loggp.Across) -> None:
    for n in (2, 3, 64, 100_000):
        assert across(FREE, n, 1e8, 1) == pytest.approx(2 * (n - 1) / n * 1e8 * FREE.gap_per_byte)


def test_small_messages_cost_a_ring_every_rank_and_a_tree_every_level() -> None:
    one = 2 * CONSTANTS.overhead + CONSTANTS.latency
    assert loggp.ring(CONSTANTS, 1024, 0, 1) == pytest.approx(2 * 1023 * one)
    assert loggp.tree(CONSTANTS, 1024, 0, 1) == pytest.approx(2 * 10 * one)
    # Recursive doubling; levels of 4 cost less where messages may follow each other faster than they arrive.
    assert loggp.best(CONSTANTS, 1024, 0, 1) < 10 * one


def test_a_message_is_as_the_model_says() -> None:
    assert loggp.message(CONSTANTS, 1000) == pytest.approx(2 * 0.5e-6 + 2e-6 + 1e-7)


@pytest.mark.parametrize(
    ("ranks", "a_node", "nodes", "local"), [(1, 8, 1, 1), (8, 8, 1, 8), (9, 8, 2, 8), (100_000, 8, 12_500, 8)]
)
def test_ranks_fill_nodes(ranks: int, a_node: int, nodes: int, local: int) -> None:
    job = Job(ranks, a_node)
    assert (job.nodes, job.local) == (nodes, local)


def test_inside_a_node_the_hierarchical_reduction_is_the_shared_one() -> None:
    reduce = loggp.REDUCTIONS["hierarchical"]
    assert reduce(CONSTANTS, Job(2, 8), 1e8) == pytest.approx(1e-5 + 1e8 * 2e-10)
    assert reduce(CONSTANTS, Job(8, 8), 1e8) == pytest.approx(loggp.shared(CONSTANTS, 8, 1e8))


def test_ranks_of_a_node_share_its_link() -> None:
    # Each of 8 has an eighth of the bytes, and an eighth of the bandwidth.
    across = loggp.hierarchical(FREE, Job(16, 8), 1e8, loggp.ring) - loggp.shared(FREE, 8, 1e8)
    assert across == pytest.approx(loggp.ring(FREE, 2, 1e8, 1))


def test_planned_agreement_costs_nothing_at_any_number_of_ranks() -> None:
    assert {loggp.AGREEMENTS["planned"](CONSTANTS, Job(ranks, 8), WORK) for ranks in RANKS} == {0.0}


TAKE_AND_TELL = 1e-5 + 100e-6 + 2e-5 + 200e-6
"""What a coordinator needs for a message of 100 tensors and its answer."""


def test_negotiated_agreement_grows_with_the_nodes() -> None:
    times = [loggp.negotiated(CONSTANTS, Job(ranks, 8), WORK) for ranks in RANKS]
    assert times == sorted(times)
    assert times[0] == 0.0
    # A coordinator takes and sends a message for every other node, and for every other rank of its own.
    assert times[-1] == pytest.approx((12_499 + 7) * TAKE_AND_TELL, rel=1e-3)
    alone = loggp.negotiated(CONSTANTS, Job(100_000, 1), WORK)
    assert alone == pytest.approx(99_999 * TAKE_AND_TELL, rel=1e-3)


def test_on_one_node_negotiated_agreement_grows_with_the_ranks() -> None:
    message = loggp.message(CONSTANTS, 5000)
    assert loggp.negotiated(CONSTANTS, Job(8, 8), WORK) == pytest.approx(7 * TAKE_AND_TELL + 2 * message)


def test_a_planned_step_on_many_nodes_approaches_a_limit() -> None:
    steps = [loggp.step(CONSTANTS, Job(ranks, 8), WORK, "planned", "hierarchical") for ranks in (8192, 100_000)]
    assert steps[1] == pytest.approx(steps[0], rel=0.01)
    negotiated = loggp.step(CONSTANTS, Job(100_000, 8), WORK, "negotiated", "hierarchical")
    assert negotiated > 10 * steps[1]


def test_rounds_cost_their_messages_and_no_more_tensors() -> None:
    once = loggp.negotiated(CONSTANTS, Job(64, 8), WORK)
    often = loggp.negotiated(CONSTANTS, Job(64, 8), replace(WORK, rounds=10))
    assert often > once
    assert often - once < 10 * (7 + 7) * (CONSTANTS.take + CONSTANTS.tell) + 40 * loggp.message(CONSTANTS, 5000)


def test_every_time_is_a_number() -> None:
    for reduce in loggp.REDUCTIONS.values():
        assert all(math.isfinite(reduce(CONSTANTS, Job(ranks, 8), 1e8)) for ranks in RANKS)

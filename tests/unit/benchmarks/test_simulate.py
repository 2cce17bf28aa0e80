"""bench simulate: the model of LogGP with its limits, constants from a file or given, and the report."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.bench.loggp_constants import CONSTANTS, WORK

from benchmarks import loggp
from benchmarks.loggp import Job
from benchmarks.simulate import above_zero, add_arguments, override, panels, read_constants, run, simulate
from hvlike.errors import UsageError

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


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def constants(tmp_path: Path) -> Path:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({"constants": asdict(CONSTANTS)}))
    return path


def test_constants_are_read_back(constants: Path) -> None:
    assert read_constants(constants) == CONSTANTS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"constants": {"latency": 1}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UsageError, match="expected the output of"):
        read_constants(tmp_path / "other.json")


def test_a_network_takes_the_place_of_what_was_measured() -> None:
    changed = override(CONSTANTS, 5.0, 100.0)
    assert changed.latency == pytest.approx(5e-6)
    assert changed.gap_per_byte == pytest.approx(1 / 12.5e9)
    assert changed.take == CONSTANTS.take
    assert override(CONSTANTS, None, None) == CONSTANTS


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "much"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        above_zero(text)


def test_the_table_says_that_no_network_was_measured(constants: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("--constants", str(constants), "--ranks", "1,16")) == 0
    alone = capsys.readouterr().out
    assert "NO NETWORK was measured" in alone
    assert run(options("--constants", str(constants), "--ranks", "16", "--latency", "3")) == 0
    given = capsys.readouterr().out
    assert "NO NETWORK" not in given
    assert "L 3 us" in given


def test_json_has_the_parts_of_every_step(constants: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("--constants", str(constants), "--ranks", "1,100000", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    first, last = found["results"]
    assert first["efficiency"] == {"planned": 1.0, "negotiated": 1.0}
    assert last["nodes"] == 12_500
    assert last["agreement"]["planned"] == 0.0
    assert last["total"]["negotiated"] > last["total"]["planned"] > found["workload"]["compute"]


def test_a_file_that_is_none_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("--constants", str(tmp_path / "none.json"))) == 2
    assert "--constants" in capsys.readouterr().err


def test_pictures_show_steps_and_parts() -> None:
    steps = [simulate(CONSTANTS, Job(ranks, 8), WORK) for ranks in (1, 64)]
    totals, parts = panels(steps)
    assert set(totals.series) == {"planned", "negotiated"}
    assert parts.labels == ["1", "64"]

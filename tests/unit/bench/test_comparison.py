"""Comparisons: interleaved in an agreed order, warm-ups left out, ratios and overheads paired."""

import random
from functools import partial

import pytest

from hvlike.bench.harness.comparison import (
    Contestant,
    Ratio,
    Summary,
    compare,
    take_turns,
    with_samples,
)
from hvlike.bench.step import overhead_ratio


class Alone:
    """A job of one rank."""

    def barrier(self) -> None:
        pass

    def maximum(self, values: list[float]) -> list[float]:
        return values


def played(seed: int, repetitions: int = 4) -> tuple[list[str], dict[str, list[float]]]:
    log: list[str] = []
    contestants = [
        Contestant(
            name,
            partial(log.append, f"prepare {name}"),
            partial(log.append, f"run {name}"),
            partial(log.append, f"check {name}"),
        )
        for name in "abc"
    ]
    return log, compare(Alone(), contestants, repetitions, warmups=1, seed=seed)


def test_every_repetition_runs_each_contestant_once() -> None:
    log, samples = played(seed=1)
    assert {name: len(each) for name, each in samples.items()} == {"a": 4, "b": 4, "c": 4}
    runs = [entry[-1] for entry in log if entry.startswith("run")]
    assert all(sorted(runs[start : start + 3]) == ["a", "b", "c"] for start in range(0, 15, 3))
    for index, entry in enumerate(log):
        if entry.startswith("run"):
            assert log[index - 1] == f"prepare {entry[-1]}"


def test_every_result_is_checked_once() -> None:
    log, _ = played(seed=1)
    assert sorted(entry for entry in log if entry.startswith("check")) == ["check a", "check b", "check c"]


def test_who_is_warmed_has_done_the_work_before_on_fresh_input() -> None:
    log: list[str] = []
    warmed = Contestant("a", partial(log.append, "prepare"), partial(log.append, "run")).warmed(2)
    warmed.turn(Alone())
    assert log == ["prepare", "run", "prepare", "run", "prepare", "run"]


def test_the_order_is_random_but_agreed() -> None:
    first, again, other = played(seed=1)[0], played(seed=1)[0], played(seed=2)[0]
    assert first == again
    assert first != other


def test_ratios_are_taken_within_a_repetition() -> None:
    # The machine became ten times slower in between: each alone would say nothing.
    samples = {"ours": [1.0, 10.0, 1.0], "theirs": [2.0, 20.0, 2.0]}
    assert Ratio.of(samples, "theirs", "ours") == Ratio(2.0, Summary(2.0, 2.0, 2.0))


def test_the_ratio_of_medians_stands_beside_them() -> None:
    samples = {"ours": [1.0, 2.0, 4.0], "theirs": [4.0, 2.0, 8.0]}
    assert Ratio.of(samples, "theirs", "ours") == Ratio(2.0, Summary(2.0, 1.5, 3.0))


def test_summary() -> None:
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, 2.0, 4.0)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0)
    assert Summary.of([1.0, 3.0]).median == pytest.approx(2.0)
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)


def test_every_round_gives_each_contestant_a_turn() -> None:
    log: list[str] = []

    def turn(name: str) -> list[float]:
        log.append(name)
        return [float(len(log))]

    measured = take_turns(random.Random(1), {name: partial(turn, name) for name in "abc"}, 4)
    assert all(sorted(log[start : start + 3]) == ["a", "b", "c"] for start in range(0, 12, 3))
    assert {name: [[float(i + 1)] for i, each in enumerate(log) if each == name] for name in "abc"} == measured


def test_json_has_quartiles_and_samples() -> None:
    assert with_samples({"a": (1.0, 2.0, 3.0)}) == {
        "a": {"median": 2.0, "first_quartile": 1.5, "third_quartile": 2.5, "samples": [1.0, 2.0, 3.0]}
    }


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    ratio = overhead_ratio([1.0, 2.0, 3.0, 9.0, 2.0], [10.0, 20.0, 10.0, 10.0, 40.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(0.2)
    assert ratio.low < ratio.value < ratio.high


def test_intervals_pair_repetitions() -> None:
    # In every repetition ours is a fifth of theirs, so every resample says a fifth, however much both scatter.
    theirs = [1.0, 5.0, 2.0, 10.0, 7.0]
    ratio = overhead_ratio([each / 5 for each in theirs], theirs)
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize("theirs", [[0.0, 0.0, 1.0], [-1.0, -2.0, 5.0]])
def test_no_ratio_to_an_overhead_that_is_none(theirs: list[float]) -> None:
    assert overhead_ratio([1.0, 1.0, 1.0], theirs) is None

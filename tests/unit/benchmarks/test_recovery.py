"""bench recovery: a phase ends with the last process that goes on; what came before the kill does not count."""

import argparse

import pytest

from benchmarks.recovery import PHASES, Recovery, Result, add_arguments, as_text, panels, read

BEFORE = [("resumed", 1.0), ("step", 2.0), ("step", 2.5), ("commit", 2.75)]
SURVIVOR = [*BEFORE, ("step", 9.9), ("noticed", 10.1), ("rebuilt", 10.2), ("resumed", 10.5), ("step", 10.6)]
SLOWER = [*BEFORE, ("noticed", 10.4), ("rebuilt", 10.45), ("resumed", 10.5), ("step", 10.55)]
SPARE = [("rebuilt", 10.4), ("resumed", 10.9), ("step", 11.0)]


def test_the_last_process_counts() -> None:
    found = read([SURVIVOR, SLOWER], 10.0)
    assert list(found.phases.values()) == pytest.approx([0.4, 0.05, 0.05, 0.1])
    assert found.total == pytest.approx(0.6)
    assert found.commits == [0.25, 0.25]


def test_a_spare_takes_part_from_where_it_begins() -> None:
    found = read([SURVIVOR, SPARE], 10.0)
    assert list(found.phases.values()) == pytest.approx([0.1, 0.3, 0.5, 0.1])


def test_a_phase_that_ended_before_the_one_before_it_took_no_time() -> None:
    late = [("noticed", 10.8), ("rebuilt", 10.9), ("resumed", 11.0), ("step", 11.1)]
    early = [("noticed", 10.1), ("rebuilt", 10.2), ("resumed", 10.3), ("step", 10.4)]
    assert all(seconds >= 0 for seconds in read([late, early], 10.0).phases.values())


def test_table_and_picture_have_every_way_and_phase() -> None:
    recovery = Recovery(dict.fromkeys(PHASES, 0.1), [0.01])
    results = [Result(way, 1 << 20, [recovery, recovery]) for way in ("shrink", "spare")]
    conditions = dict.fromkeys(("ranks", "cores", "mpi", "hvlike", "torch", "python", "repetitions"), 3)
    text = as_text(conditions, results)
    assert all(phase in text for phase in PHASES)
    assert "400 ms" in text
    assert [panel.title for panel in panels(results)] == ["shrink", "spare"]
    assert results[0].as_json()["total"]["worst"] == pytest.approx(0.4)


def test_one_rank_is_refused() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    with pytest.raises(argparse.ArgumentError, match="nobody is left"):
        parser.parse_args(["--ranks", "1"])

"""bench simulate: constants come from a file or are given, and the report says which network was not measured."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.bench.loggp_constants import CONSTANTS, WORK

from benchmarks.loggp import Job
from benchmarks.simulate import above_zero, add_arguments, override, panels, read_constants, run, simulate
from hvlike.errors import UsageError


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

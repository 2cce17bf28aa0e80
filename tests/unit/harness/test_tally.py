"""The closing line of scripts/test: what counts as passed and what as failed."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "lib" / "tally.py"


def load_script():
    """Import scripts/lib/tally.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("tally", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tally"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ranks", "status", "expected"),
    [
        pytest.param([["passed a", "passed b"], ["passed a", "passed b"]], 0, (2, 0, 0), id="a test counts once"),
        pytest.param([["passed a", "skipped b"]], 0, (1, 0, 1), id="skipped tests are no passed tests"),
        pytest.param([["passed a", "passed b"], ["passed a", "failed b"]], 1, (1, 1, 0), id="failed on one rank"),
        pytest.param([["failed a"], ["failed a"]], 1, (0, 1, 0), id="failed on every rank counts once"),
        pytest.param([["failed a", "failed a"]], 1, (0, 1, 0), id="failed and torn down badly counts once"),
        pytest.param([["passed a"]], 137, (1, 1, 0), id="the run broke off"),
        pytest.param([], 0, (0, 1, 0), id="nothing was executed"),
        pytest.param([["skipped a"]], 0, (0, 1, 1), id="everything was skipped"),
    ],
)
def test_a_run(tmp_path: Path, ranks: list[list[str]], status: int, expected: tuple[int, int, int]) -> None:
    write_run(tmp_path, ranks, status)
    outcome = load_script().tally(tmp_path)
    assert (outcome.passed, outcome.failed, outcome.skipped) == expected


def test_the_closing_line_sums_runs_and_broken_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", [["passed a"]], 0)
    write_run(tmp_path / "two", [["passed a", "failed b"]], 1)
    (tmp_path / "mypy.broken").touch()
    assert load_script().main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 2 failed"


def test_failed_tests_are_named_before_the_closing_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "three", [["failed t::a sum"], ["failed t::a sum"], ["failed t::a product"]], 1)
    (tmp_path / "mypy.broken").touch()
    load_script().main(tmp_path)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "FAILED three: t::a, rank 0, 1: sum",
        "FAILED three: t::a, rank 2: product",
        "FAILED mypy: failed",
        "0 passed, 2 failed",
    ]


def test_a_run_that_broke_off_says_where_each_rank_was(tmp_path: Path) -> None:
    write_run(tmp_path, [["started a", "passed a", "started b"], ["started a", "passed a"]], 1)
    stacks = """Timeout (0:01:50)!
Thread 0x00007f (most recent call first):
  File "/x/helper.py", line 9 in help

Thread 0x00008f (most recent call first):
  File "/x/doorbell.py", line 3 in wait
  File "/x/loop.py", line 40 in drive
"""
    (tmp_path / "stacks-0").write_text(stacks)
    assert load_script().tally(tmp_path).failures == (
        "b, rank 0: did not end, hung at wait (doorbell.py:3) < drive (loop.py:40)",
        "ended with 1 after 1 passed tests",
    )


def test_many_failures_leave_room_in_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", [[f"failed t{number}" for number in range(100)]], 1)
    load_script().main(tmp_path)
    assert len(capsys.readouterr().out.splitlines()) < 40


def write_run(folder: Path, ranks: list[list[str]], status: int) -> None:
    """Write what a run leaves behind."""
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        records = ["\t".join([*line.split(), ""][:3]) for line in lines]
        (folder / f"rank-{rank}").write_text("".join(record + "\n" for record in records))
    (folder / "exit-status").write_text(f"{status}\n")

"""The closing line of scripts/test: what counts as passed and what as failed."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "lib" / "tally.py"


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


def write_run(folder: Path, ranks: list[list[str]], status: int) -> None:
    """Write what a run leaves behind."""
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        (folder / f"rank-{rank}").write_text("".join(line.replace(" ", "\t") + "\n" for line in lines))
    (folder / "exit-status").write_text(f"{status}\n")

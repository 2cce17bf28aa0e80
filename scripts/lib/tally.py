"""Add up what the ranks of several test runs recorded, and say it in one closing line.

A folder holds, for each run, a folder with the files `rank-0`, `rank-1`, ... (lines `outcome<TAB>test`, written by
tests/conftest.py) and `exit-status`; and for each check that failed a file `NAME.broken`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """Numbers of one run: tests passed on every rank, failed on any, and skipped on rank 0."""

    passed: int
    failed: int
    skipped: int


def tally(run: Path) -> Outcome:
    """Count one run. A test counts once, however many ranks ran it; a run that broke off or ran nothing has failed."""
    outcomes: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for file in sorted(run.glob("rank-*")):
        for line in file.read_text().splitlines():
            outcome, test = line.split("\t", 1)
            if outcome == "failed" or file.name == "rank-0":
                outcomes[outcome].add(test)
    failed = len(outcomes["failed"])
    passed = len(outcomes["passed"] - outcomes["failed"])
    ended_well = (run / "exit-status").read_text().strip() == "0"
    if not failed and not (passed and ended_well):
        failed = 1
    return Outcome(passed, failed, len(outcomes["skipped"]))


def main(folder: Path) -> int:
    """Print one line per run, the broken checks and the closing line. Returns the exit status."""
    runs = {
        run.name: tally(run) for run in sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime) if run.is_dir()
    }
    broken = [path.stem for path in sorted(folder.glob("*.broken"))]
    print()
    for name, outcome in runs.items():
        executed = outcome.passed or "no test"
        print(f"{name}: {executed} passed, {outcome.failed} failed, {outcome.skipped} skipped")
    for name in broken:
        print(f"{name}: failed")
    passed = sum(outcome.passed for outcome in runs.values())
    failed = sum(outcome.failed for outcome in runs.values()) + len(broken)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

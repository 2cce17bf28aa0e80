"""Add up what the ranks of several test runs recorded; name the tests that failed and say the sum in a closing line.

A folder holds, for each run, a folder with `exit-status` and, written by tests/conftest.py, the files `rank-0`,
`rank-1`, ... (lines `event<TAB>test<TAB>reason`; events: started, passed, failed, skipped) and `stacks-0`, ... (where
the threads of a rank are, when a test does not end). For each check that failed it holds a file `NAME.broken`.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# So many failures are named at the end, at most.
NAMED_FAILURES = 25


@dataclass(frozen=True)
class Event:
    """One line of a rank's record."""

    rank: int
    kind: str
    test: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """Numbers of one run: tests passed on every rank, failed on any, and skipped on rank 0; and what went wrong."""

    passed: int
    failed: int
    skipped: int
    failures: tuple[str, ...]


def tally(run: Path) -> Outcome:
    """Count one run. A test counts once, however many ranks ran it; a run that broke off or ran nothing has failed."""
    ranks = read_records(run)
    tests: dict[str, set[str]] = {"started": set(), "passed": set(), "failed": set(), "skipped": set()}
    for event in (event for events in ranks.values() for event in events):
        if event.kind == "failed" or event.rank == 0:
            tests[event.kind].add(event.test)
    failed = len(tests["failed"])
    passed = len(tests["passed"] - tests["failed"])
    status = (run / "exit-status").read_text().strip()
    failures = [*describe_failures(ranks), *describe_unfinished(run, ranks)]
    if not failed and not (passed and status == "0"):
        failed = 1
        failures.append(f"ended with {status} after {passed} passed tests")
    return Outcome(passed, failed, len(tests["skipped"]), tuple(failures))


def read_records(run: Path) -> dict[int, list[Event]]:
    """What each rank wrote, by rank."""
    ranks = {}
    for file in run.glob("rank-*"):
        rank = int(file.name.removeprefix("rank-"))
        ranks[rank] = [Event(rank, *line.split("\t", 2)) for line in file.read_text().splitlines()]
    return dict(sorted(ranks.items()))


def describe_failures(ranks: dict[int, list[Event]]) -> Iterator[str]:
    """One line for each test and reason, with all the ranks that gave this reason."""
    found: dict[tuple[str, str], list[int]] = {}
    for event in (event for events in ranks.values() for event in events):
        if event.kind == "failed":
            found.setdefault((event.test, event.reason), []).append(event.rank)
    for (test, reason), where in found.items():
        yield f"{test}, rank {', '.join(map(str, where))}: {reason}"


def describe_unfinished(run: Path, ranks: dict[int, list[Event]]) -> Iterator[str]:
    """One line for each rank that was ended inside a test."""
    for rank, events in ranks.items():
        if events and events[-1].kind == "started":
            stacks = run / f"stacks-{rank}"
            place = innermost_calls(stacks.read_text()) if stacks.exists() else ""
            yield f"{events[-1].test}, rank {rank}: did not end{place and f', hung at {place}'}"


def innermost_calls(stacks: str) -> str:
    """The innermost calls of the main thread, which faulthandler writes last; pytest's own are left out."""
    main_thread = stacks.rpartition("hread 0x")[2]
    calls = re.findall(r'File "(.+)", line (\d+) in (.+)', main_thread)
    ours = [f"{function} ({Path(file).name}:{line})" for file, line, function in calls if "/site-packages/" not in file]
    return " < ".join(ours[:14])


def main(folder: Path) -> int:
    """Print one line per run, what failed, and the closing line. Returns the exit status."""
    runs = {
        run.name: tally(run) for run in sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime) if run.is_dir()
    }
    broken = [path.stem for path in sorted(folder.glob("*.broken"))]
    print()
    for name, outcome in runs.items():
        executed = outcome.passed or "no test"
        print(f"{name}: {executed} passed, {outcome.failed} failed, {outcome.skipped} skipped")
    failures = [f"{name}: {failure}" for name, outcome in runs.items() for failure in outcome.failures]
    failures += [f"{name}: failed" for name in broken]
    for failure in failures[:NAMED_FAILURES]:
        print(f"FAILED {failure}")
    if len(failures) > NAMED_FAILURES:
        print(f"FAILED {len(failures) - NAMED_FAILURES} more, named above")
    passed = sum(outcome.passed for outcome in runs.values())
    failed = sum(outcome.failed for outcome in runs.values()) + len(broken)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

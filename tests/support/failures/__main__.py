"""Print the table of failures, in Markdown; with --ends, the matrix of ends.

PYTHONPATH=tests python -m support.failures [--failure F] [--phase P] [--ranks N] [--verbose]
PYTHONPATH=tests python -m support.failures --ends [--all] [--how H] [--streams S] [--between B] [--start S] [--jobs N]
"""

import argparse

from support.failures.endings import endings
from support.failures.ends import BETWEEN, HOW, START, STREAMS
from support.failures.ends_table import run_ends
from support.failures.outcome import HEAD, run_case
from support.failures.surroundings import surroundings


def main() -> int:
    """Run the cases that were chosen; 1 when one of them does not end as it must."""
    parser = argparse.ArgumentParser(
        prog="failures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--failure", action="append", help="such as SIGKILL")
    parser.add_argument("--phase", action="append", help="a part of its name, such as backward or fork")
    parser.add_argument("--ranks", action="append", type=int, choices=(2, 3, 4))
    parser.add_argument("--verbose", action="store_true", help="all that the jobs print on stderr")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    ends = parser.add_argument_group("the matrix of ends")
    ends.add_argument("--ends", action="store_true", help="every pair of values of two dimensions")
    ends.add_argument("--all", action="store_true", help="every cell")
    ends.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at once (2)")
    ends.add_argument("--seed", type=int, default=0, metavar="N", help="other cells that have every pair (0)")
    ends.add_argument("--write", action="store_true", help="write the table into docs/failures.md")
    for name, values in (("how", HOW), ("streams", STREAMS), ("between", BETWEEN), ("start", START)):
        ends.add_argument(f"--{name}", action="append", choices=values)
    options = parser.parse_args()
    if options.ends:
        return run_ends(options)
    cases = [
        case
        for case in endings() + surroundings()
        if case.failure in (options.failure or [case.failure])
        and any(part in case.phase for part in options.phase or [""])
        and case.ranks in (options.ranks or [case.ranks])
    ]
    if options.list:
        print(*cases, sep="\n")
        return 0
    print(HEAD)
    failed = 0
    for case in cases:
        outcome = run_case(case)
        failed += bool(outcome.wrong)
        print(outcome.row(), flush=True)
        if options.verbose:
            print(outcome.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

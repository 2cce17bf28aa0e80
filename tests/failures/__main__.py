"""Print the table of failures, in Markdown.

PYTHONPATH=tests python -m failures [--failure F] [--phase P] [--ranks N] [--verbose]
"""

import argparse

from failures.cases import FAILURES, all_cases
from failures.outcome import HEAD, run_case
from failures.phases import PHASES


def main() -> int:
    """Run the cases that were chosen; 1 when one of them does not end as it must."""
    parser = argparse.ArgumentParser(prog="failures", description=__doc__)
    parser.add_argument("--failure", action="append", choices=FAILURES)
    parser.add_argument("--phase", action="append", choices=PHASES)
    parser.add_argument("--ranks", action="append", type=int, choices=(2, 3, 4))
    parser.add_argument("--verbose", action="store_true", help="all that the jobs print on stderr")
    options = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if case.failure in (options.failure or FAILURES)
        and case.phase in (options.phase or PHASES)
        and case.ranks in (options.ranks or (2, 3, 4))
    ]
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

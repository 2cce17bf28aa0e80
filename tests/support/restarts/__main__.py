"""Restarts and preemptions at random moments: each run has to end with the bits of a run that nobody has disturbed.

    PYTHONPATH=tests:. python -m support.restarts restart --runs 20 --seed 1
    PYTHONPATH=tests:. python -m support.restarts preempt --runs 20 --seed 1
    PYTHONPATH=tests:. python -m support.restarts daemon --runs 5 --seed 1

restart: a rank, all ranks or mpirun are killed with -9, one to three times, and the newest checkpoint is damaged after
each. preempt: SIGTERM or SIGUSR1 to `launch`, to mpirun, to a rank or to all; the job is started again while it ends
with 75. daemon: as restart, on two hosts (namespaces; needs root), where the launcher's daemon on the second is killed.
A line for each run, then counts and the worst case. Exit status 1 if a run was wrong.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from support.hosts import hosts
from support.restarts.disturbed import Disturbed, Outcome, reference


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["restart", "preempt", "daemon"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    references: dict[int, str] = {}
    for run in range(options.runs):
        chance = random.Random(f"{options.kind} {options.seed} {run}")
        ranks = 2 if options.kind == "daemon" else chance.choice([2, 2, 3])
        on = hosts(ranks) if options.kind == "daemon" else contextlib.nullcontext()
        with on as machines, tempfile.TemporaryDirectory(prefix="hvlike-restarts-") as folder:
            if ranks not in references:
                references[ranks] = reference(ranks, Path(folder))
            disturbed = Disturbed(ranks, Path(folder), chance, machines=machines)
            if machines is not None:
                disturbed.victims = ("a daemon",)
            started = time.monotonic()
            outcome = disturbed.preemptions() if options.kind == "preempt" else disturbed.restarts()
            outcome = outcome.compared(references[ranks], time.monotonic() - started)
        outcomes.append(outcome)
        print(f"{options.kind} {options.seed}.{run}: {ranks} ranks, {outcome}", flush=True)
    wrong = [each for each in outcomes if each.faults]
    slowest = max(each.seconds for each in outcomes)
    events = sum(len(each.events) for each in outcomes)
    print(f"{len(outcomes)} runs, {events} events, {len(wrong)} wrong; the longest took {slowest:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill ranks of a training at random moments, again and again, and judge every run.

    PYTHONPATH=tests python -m support.kills --runs 200                  shrink
    PYTHONPATH=tests python -m support.kills --runs 200 --spares 2       hot spares
    PYTHONPATH=tests python -m support.kills --runs 20 --training zero   what only one rank has
    PYTHONPATH=tests python -m support.kills --runs 20 --two-hosts kill      ranks of both; cut: the link between them

Each run starts `program.py` under `mpirun --with-ft ulfm` on 2 to 6 ranks and kills one rank, two at once, or several
one after the other, with SIGKILL, at a random moment between the start of training and its end. It prints a line for
each run and a summary, and ends with 1 if anything was wrong. A run that ended before anyone was killed does not count.
Two hosts are network namespaces, which need root. Where their link is cut the ranks of the second are lost: the first
has at least as many, and rank 0.
Source: the promises of docs/elastic.md.
"""

import argparse
import contextlib
import random
import signal
import statistics
import sys

from support.hosts import hosts
from support.kills.campaign import CUT, LOST, SECONDS, plan_cut, plan_kills, run_once
from support.kills.judge import (
    Line,
    commits_of,
    own_states_of,
    read_lines,
    what_is_wrong,
    what_is_wrong_with_own_states,
)


def main() -> None:
    """Run the campaign."""
    # Also a termination ends the job, and removes the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description="Kill ranks of trainings at random moments")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150, help="a multiple of 3: the last step has a commit")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4, 5, 6])
    parser.add_argument("--training", choices=["plain", "zero"], default="plain")
    parser.add_argument("--two-hosts", choices=["kill", CUT], default=None)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a job counts as hung")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    choice = random.Random(seed)
    print(f"seed {seed}", flush=True)
    references: dict[int, tuple[list[Line], float]] = {}
    number, bad, deaths, recoveries = 0, 0, 0, []
    while number < options.runs:
        ranks = choice.choice(options.ranks)
        with hosts(2) if options.two_hosts else contextlib.nullcontext() as machines:
            common = options.limit, options.training, machines
            if ranks not in references:
                job, _, seconds, _ = run_once(ranks, 0, options.steps, [], *common)
                references[ranks] = read_lines(job.check().stdout), seconds
            reference, seconds = references[ranks]
            cut = options.two_hosts == CUT
            kind, kills = (
                plan_cut(choice, ranks, seconds) if cut else plan_kills(choice, ranks, options.spares, seconds)
            )
            job, killed, took, left = run_once(ranks, options.spares, options.steps, kills, *common, cut=cut)
        lines: list[Line] = read_lines(job.stdout)
        wrong = what_is_wrong(lines, ranks, options.spares, killed, commits_of(reference))
        from_disk = "starts from commit" in job.stderr
        # Only the statistics of `plain` may be lost.
        lost = {int(each) for each in LOST.findall(job.stderr)} if options.training == "plain" else set()
        wrong += what_is_wrong_with_own_states(lines, ranks, own_states_of(reference), from_disk=from_disk, lost=lost)
        wrong += ["hung"] if job.timed_out else []
        wrong += [f"left behind: {each}" for each in (*job.survivors, *left)]
        times = [float(each) for each in SECONDS.findall(job.stderr)]
        recoveries += times
        bad += bool(wrong)
        print(
            f"{number}: {ranks}+{options.spares} ranks, {kind} {kills}, killed {killed}, recovered in {times} s, "
            f"from {took:.1f} s on{', from the disk' * from_disk}{', buffers lost' * bool(lost)}: {wrong or 'right'}",
            flush=True,
        )
        if wrong:
            print(job.describe(), flush=True)
        # A run that ended before the first kill has shown nothing, unless it was wrong: another one takes its place.
        number += bool(killed or wrong)
        deaths += len(killed)
    print(f"{number} runs, {deaths} processes killed, {bad} wrong; {len(recoveries)} recoveries", end="")
    if recoveries:
        print(f": median {statistics.median(recoveries):.3f}, worst {max(recoveries):.3f} s", end="")
    print()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

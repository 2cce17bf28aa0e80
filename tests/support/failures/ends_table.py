"""Runs the cells of the matrix of ends that were chosen, several at once, and makes a table of them."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import starmap

from support.failures.ends import HOW, START, STARTED, End, Ended, pairs, product, run_end
from support.job import CHECKOUT

PAGE = CHECKOUT / "docs" / "failures.md"
BEGIN, FINISH = "<!-- ends of jobs: scripts/ends_of_jobs --write -->\n", "<!-- end of the table -->\n"


def run_ends(options: argparse.Namespace) -> int:
    """Run them, print each one that is wrong, and the table; 1 when one is wrong."""
    chosen = [end for end in (product() if options.all else pairs(options.seed)) if _is_chosen(end, options)]
    if not chosen:
        # No pair of values has all that was asked for.
        chosen = [end for end in product() if _is_chosen(end, options)]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    done: list[Ended] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(run_end, end) for end in chosen]):
            ended = future.result()
            done.append(ended)
            print(f"{len(done)}/{len(chosen)} {ended.end}: {ended.seconds:.1f} s, {ended.wrong or 'right'}", flush=True)
            if ended.wrong and options.verbose:
                print(ended.text, flush=True)
    text = table(done)
    print(text)
    if options.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}{FINISH}{rest.partition(FINISH)[2]}")
    return int(any(ended.wrong for ended in done))


def _is_chosen(end: End, options: argparse.Namespace) -> bool:
    asked = (options.how, options.streams, options.between, options.start)
    return all(starmap(lambda some, value: not some or value in some, zip(asked, vars(end).values(), strict=True)))


def table(done: Sequence[Ended]) -> str:
    """In Markdown: by way to fail and by start, how many jobs, and the longest time from the failure to the end."""
    lines = ["| rank 1 | " + " | ".join(STARTED[start] for start in START) + " |", "|---" * (len(START) + 1) + "|"]
    for how in HOW:
        cells = []
        for start in START:
            some = [ended for ended in done if (ended.end.how, ended.end.start) == (how, start)]
            wrong = sum(bool(ended.wrong) for ended in some)
            said = f", **{wrong} wrong**" if wrong else ""
            cells.append(f"{len(some)} in {max(ended.seconds for ended in some):.0f} s{said}" if some else "")
        if any(cells):
            lines.append(f"| {how} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"

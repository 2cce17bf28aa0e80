"""Kill a random rank of RPC jobs at random moments, and print how the survivors have ended.

PYTHONPATH=tests python -m support.lost_workers [--jobs N] [--first SEED]
"""

import argparse

from support.lost_workers.campaign import draw, run


def main() -> int:
    """Run the jobs; 1 when a survivor of one of them has not ended as it must."""
    parser = argparse.ArgumentParser(prog="lost_workers", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first job")
    options = parser.parse_args()
    outcomes = []
    for seed in range(options.first, options.first + options.jobs):
        loss = draw(seed)
        outcome = run(loss)
        outcomes.append(outcome)
        said = outcome.wrong or f"ok, {outcome.errors} operations ended with it, the longest took {outcome.worst:.2f} s"
        said += "; mpirun had to be killed at the end" if outcome.launcher_stays else ""
        print(f"{loss}: {said}", flush=True)
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    worst = max((outcome.worst for outcome in outcomes), default=0.0)
    stays = sum(outcome.launcher_stays for outcome in outcomes)
    print(
        f"{len(outcomes)} jobs, {failed} wrong, {stays} times mpirun stayed; the longest operation took {worst:.2f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Which of many jobs the tests try: others from commit to commit, so that all have their turn."""

import subprocess

from support.job import CHECKOUT


def number_of_commit() -> int:
    """A number that is another one in the next commit; the same for all who run this one."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return int(asked.stdout[:8] or "0", 16)

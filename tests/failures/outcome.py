"""How a job with a failing rank has ended, and what is wrong with that."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from failures.cases import LIMIT_SECONDS, Case
from job import start_job

BANNER = re.compile(r"^-{20,}\n.*?^-{20,}\n|^={20,}\n.*?^={20,}\n", re.MULTILINE | re.DOTALL)
"""What a launcher prints when ranks abort, between two rules."""

REPORT = re.compile(r"^hvlike: (?:.* on rank \d+ of \d+|rank \d+ of \d+ on \S+ ended with)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    case: Case
    seconds: float
    status: int
    stderr: str
    wrong: str
    """Empty: as it must be."""

    def row(self) -> str:
        """In Markdown."""
        case = self.case
        lines = [line.strip() for line in BANNER.sub("", self.stderr).splitlines() if line.strip()]
        shown = "<br>".join(line[:160].replace("|", "\\|") for line in lines[-3:])
        verdict = "ok" if not self.wrong else f"**{self.wrong}**"
        cells = (case.failure, case.phase, case.ranks, f"{self.seconds:.1f}", self.status, verdict, shown)
        return f"| {' | '.join(map(str, cells))} |"


HEAD = "| failure | phase | ranks | seconds | exit | verdict | last lines |\n|---|---|---|---|---|---|---|"


def run_case(case: Case, timeout: float = 40) -> Outcome:
    """Run it; never raises for what the job does."""
    started = time.time()
    with start_job(case.program(), case.ranks, env=case.env) as running:
        job = running.wait(timeout)
    marks = [float(mark) for mark in re.findall(r"END ([\d.]+)", job.stdout)]
    seconds = started + job.seconds - min(marks) if marks else job.seconds
    wrong = []
    if not marks:
        wrong.append("the failure did not come about")
    if job.timed_out:
        wrong.append("timed out")
    elif seconds > LIMIT_SECONDS:
        wrong.append(f"took {seconds:.1f} s")
    if job.returncode == 0:
        wrong.append("ended with 0")
    if job.survivors:
        wrong.append(f"left {len(job.survivors)} processes")
    left = {path for path in re.findall(r"SHARED (\S+)", job.stdout) if Path(path).exists()}
    if left:
        wrong.append(f"left {sorted(left)}")
    if not any(word in job.stderr for word in case.words):
        wrong.append("cause not named")
    reports = len(REPORT.findall(job.stderr))
    if reports > 1:
        wrong.append(f"{reports} reports")
    return Outcome(case, seconds, job.returncode, job.stderr, "; ".join(wrong))

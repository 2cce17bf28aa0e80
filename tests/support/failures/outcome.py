"""How a job with a failure has ended, and what is wrong with that."""

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support.failures.case import LIMIT_SECONDS, Case
from support.job import Job, start_job

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
        if not lines:
            lines = [line.strip() for line in self.stderr.splitlines() if line.strip().strip("-=")]
        shown = "<br>".join(line[:160].replace("|", "\\|") for line in lines[-3:])
        verdict = "ok" if not self.wrong else f"**{self.wrong}**"
        cells = (case.failure, case.phase, case.ranks, f"{self.seconds:.1f}", self.status, verdict, shown)
        return f"| {' | '.join(map(str, cells))} |"


HEAD = "| failure | phase | ranks | seconds | exit | verdict | last lines |\n|---|---|---|---|---|---|---|"


def run_case(case: Case, timeout: float = 60, *, timed: bool = True) -> Outcome:
    """Run it; never raises for what the job does. timed: an end that comes late is wrong, too."""
    with tempfile.TemporaryDirectory(prefix="hvlike-checkpoints-") as folder:
        env = {**case.env, "FOLDER": folder}
        started = time.time()
        with start_job(case.program, case.ranks, env=env, setup=case.setup) as running:
            job = running.wait(timeout)
        marks = [float(mark) for mark in re.findall(r"END ([\d.]+)", job.stdout)]
        seconds = started + job.seconds - min(marks) if marks else job.seconds
        wrong = faults(case, job, seconds if timed else 0.0)
        if case.afterwards:
            with start_job(case.afterwards, case.ranks, env=env) as running:
                after = running.wait(timeout)
            if after.returncode:
                wrong.append(f"the job after it failed: {after.stderr[-300:]}")
    return Outcome(case, seconds, job.returncode, job.stderr, "; ".join(wrong))


def faults(case: Case, job: Job, seconds: float) -> list[str]:
    """What is not as it must be."""
    left = {path for path in re.findall(r"SHARED (\S+)", job.stdout) if Path(path).exists()}
    reports = len(REPORT.findall(job.stderr))
    found = {
        "timed out": job.timed_out,
        f"took {seconds:.1f} s": not case.ends_well and seconds > LIMIT_SECONDS,
        f"ended with {job.returncode}": (job.returncode == 0) != case.ends_well,
        f"left the processes {list(job.survivors)}": bool(job.survivors),
        f"left {sorted(left)}": bool(left),
        "the cause is not named": not any(word in job.stderr + job.stdout for word in case.words),
        f"{reports} reports": reports > 1,
    }
    return [what for what, is_so in found.items() if is_so]

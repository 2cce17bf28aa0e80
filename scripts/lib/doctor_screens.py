"""Run the doctor in a healthy and in three broken set-ups, and put what it prints into docs/troubleshooting.md.

    .venv/bin/python scripts/lib/doctor_screens.py

Needs root and unshare(1) for the small /dev/shm, and an MPICH in .venv-mpich for the wrong mpirun (scripts/test makes
both environments). Paths of the checkout are shown as ~/hvlike. In the page, a comment `screen: NAME` stands above the
block that is replaced. The page shows only the checks that fail.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SHOWN_AS = "~/hvlike"
SECONDS = 120

COMMANDS = {
    "healthy": "mpirun -n 2 python -m hvlike doctor --model 25e6",
    "wrong mpirun": f"PATH={ROOT}/.venv-mpich/bin:$PATH {ROOT}/.venv/bin/python -m hvlike doctor",
    "tiny /dev/shm": (
        "unshare -m sh -c 'mount -t tmpfs -o size=1m tmpfs /dev/shm; mpirun -n 2 python -m hvlike doctor'"
    ),
    # Where there is no Slurm, its variables make what two ranks of srun would see without PMIx.
    "srun singletons": ("SLURM_JOB_ID=17 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 python -m hvlike doctor"),
}


def main() -> int:
    """Run all set-ups and write the page."""
    text = PAGE.read_text()
    for name, command in COMMANDS.items():
        print(f"{name}: {command}", file=sys.stderr)
        text = replace(text, name, failures_of(screen(command)))
    PAGE.write_text(text)
    return 0


def screen(command: str) -> str:
    """What a terminal shows of a command: its output without what MPI says on stderr, and its status."""
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TERM")}
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
    }
    ended = subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = [f"$ {command}", ended.stdout.rstrip(), "$ echo $?", str(ended.returncode)]
    return "\n".join(lines).replace(str(ROOT), SHOWN_AS)


def failures_of(shown: str) -> str:
    """A screen with only those checks that fail; `...` stands for the others."""
    head, *checks, end = re.split(r"\n(?= *(?:ok|warn|FAIL|skip)  \S)|\n(?=\n\d+ ok,)", shown)
    shortened = [check if check.startswith("FAIL") else "..." for check in checks]
    return "\n".join([head, *(line for line, _ in itertools.groupby(shortened)), end])


def replace(text: str, name: str, shown: str) -> str:
    """The page with another screen of this name."""
    block = re.compile(rf"(<!-- screen: {re.escape(name)} -->\n```text\n).*?(```\n)", flags=re.DOTALL)
    replaced, count = block.subn(lambda match: f"{match[1]}{shown}\n{match[2]}", text)
    if count != 1:
        raise SystemExit(f"{PAGE}: expected one screen {name!r}, found {count}")
    return replaced


if __name__ == "__main__":
    sys.exit(main())

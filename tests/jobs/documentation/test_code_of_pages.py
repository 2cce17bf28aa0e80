"""The Python that README.md and the pages of docs/ show runs, on two ranks."""

from support.documentation.blocks import PAGES, blocks_of, program_of
from support.job import CHECKOUT, run_job

RUNNER = CHECKOUT / "tests" / "support" / "documentation" / "runner.py"


def test_what_the_pages_show_runs() -> None:
    expected = [page.name for page in PAGES if any(program_of(block) is not None for block in blocks_of(page))]
    job = run_job(RUNNER, 2, args=[str(page) for page in PAGES]).check()
    assert [line.split(":")[0] for line in job.stdout.splitlines() if "blocks ran" in line] == expected

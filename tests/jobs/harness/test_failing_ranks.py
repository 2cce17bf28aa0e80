"""tests/conftest.py under mpirun: a failing test leaves no rank waiting, and nothing selected is left out unseen."""

import shutil
from pathlib import Path

from support.job import CHECKOUT, Job, run_job

PROGRAM = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"

FAILS_ON_BOTH = """
def test_first():
    assert False, "the first test"
def test_second():
    pass
"""

FAILS_ON_ONE = """
from mpi4py import MPI
def test_that_waits():
    assert MPI.COMM_WORLD.rank == 0, "only here"
    MPI.COMM_WORLD.barrier()
"""

TEN = "import pytest\n@pytest.mark.parametrize('number', range(10))\ndef test(number):\n    pass\n"


def run_tests(folder: Path, tests: str, records: str, part: str = "1/1") -> Job:
    """Run these tests on two ranks, under a copy of our conftest.py and configuration."""
    conftest = (CHECKOUT / "tests" / "conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest.replace("PEERS_SECONDS = 20.0", "PEERS_SECONDS = 2.0"))
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    (folder / "test_inner.py").write_text(tests)
    args = ["--rootdir", str(folder), "-c", str(folder / "pyproject.toml"), "--color=no", str(folder / "test_inner.py")]
    return run_job(PROGRAM, 2, args=args, env={"HVLIKE_TEST_RECORDS": records, "HVLIKE_TEST_PART": part})


def test_a_test_that_fails_everywhere_does_not_stop_the_run(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    job = run_tests(tmp_path, FAILS_ON_BOTH, str(records))
    assert "1 failed, 1 passed" in job.stdout, job.describe()
    for rank in range(2):
        lines = (records / f"rank-{rank}").read_text().splitlines()
        assert [line.split("\t")[:2] for line in lines] == [
            ["started", "test_inner.py::test_first"],
            ["failed", "test_inner.py::test_first"],
            ["started", "test_inner.py::test_second"],
            ["passed", "test_inner.py::test_second"],
        ]
        assert "the first test" in lines[1]
        assert "(test_inner.py:3)" in lines[1]


def test_a_test_that_fails_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    job = run_tests(tmp_path, FAILS_ON_ONE, str(records))
    assert job.returncode != 0
    assert not job.timed_out
    assert job.survivors == ()
    assert "rank 1 of 2 failed test_inner.py::test_that_waits" in job.stderr
    assert "only here" in job.stderr
    assert "rank 1 ends the job" in job.stderr
    assert (records / "rank-0").read_text() == "started\ttest_inner.py::test_that_waits\t\n"
    assert "only here" in (records / "rank-1").read_text().splitlines()[1]


def test_a_test_file_that_cannot_be_imported_is_recorded(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    job = run_tests(tmp_path, "import missing_module", str(records))
    assert job.returncode != 0
    for rank in range(2):
        (line,) = (records / f"rank-{rank}").read_text().splitlines()
        assert line.startswith("failed\ttest_inner.py\t")
        assert "No module named 'missing_module'" in line


def test_parts_of_a_run_are_the_whole(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    for part in ("1,2/3", "3/3"):
        run_tests(tmp_path, TEN, str(records), part).check()
    passed = [line.split("\t")[1] for line in (records / "rank-1").read_text().splitlines() if line[0] == "p"]
    assert sorted(passed) == [f"test_inner.py::test[{number}]" for number in range(10)]


def test_a_test_that_is_marked_pure_and_uses_ranks_is_refused(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    job = run_tests(tmp_path, "import pytest\n@pytest.mark.pure\ndef test(hvd):\n    pass\n", str(records))
    assert job.returncode != 0
    assert "failed\ttest_inner.py::test\tmarked pure, and uses hvd\n" in (records / "rank-1").read_text()

"""How the tests behave under mpirun: one reporter, one record per rank, and no rank left waiting for a failed one."""

import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
# The folder says what a test needs.
MARKS = {"unit": "pure", "jobs": "job"}

# Which launcher started us is read from the environment: plain runs must not start MPI for it.
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)

# scripts/test names a folder here; each rank writes down when a test starts and how it ended, in its own file there.
RECORDS = os.environ.get("HVLIKE_TEST_RECORDS")
PEERS_SECONDS = 20.0
# "2/3": of the tests that were selected, the second third; "1,2/5": two fifths.
PART = os.environ.get("HVLIKE_TEST_PART", "1/1")
# "yes": of what is marked `in_turn` some cases, others from commit to commit; else all.
TAKES_TURNS = os.environ.get("HVLIKE_TEST_TURNS") == "yes"

# "cuda": tests make their tensors on the GPU of their rank (scripts/gpu_check runs some so).
DEVICE = os.environ.get("HVLIKE_TEST_DEVICE", "")

# Each rank has a place of its own for temporary files: in a common one they would tidy up behind each other's back.
TEMPORARY = tempfile.mkdtemp(prefix="hvlike-tests-", dir=RECORDS)
os.environ["PYTEST_DEBUG_TEMPROOT"] = TEMPORARY

# In the background of a script SIGINT is ignored, and so it would be in the jobs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With one and two ranks torch is as it is for everybody.
if SIZE > 2:
    import late

    late.install()

# A file descriptor, open as long as the process lives.
STACKS = os.open(Path(RECORDS) / f"stacks-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if RECORDS else -1
# Sooner than the time limit of a test ends the process, so that each rank says where it hangs.
HANGING_SECONDS = 110.0

# All ranks must draw the same examples.
hypothesis.settings.register_profile("ranks", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("ranks")


@pytest.fixture(scope="session")
def hvd() -> Iterator[ModuleType]:
    """hvlike, initialised once for the whole run."""
    from support.in_loop import check_in_loop

    import hvlike

    check_in_loop()
    hvlike.init()
    with on_device(hvlike):
        yield hvlike
    hvlike.shutdown()


@contextmanager
def on_device(hvd: ModuleType) -> Iterator[None]:
    """Where tests make their tensors."""
    if not DEVICE:
        yield
        return
    from support.devices import OnDevice

    with OnDevice(hvd.pin_device(DEVICE)):
        yield


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 alone report; other ranks speak up when a test fails."""
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        # Lives as long as the process.
        silence = open(os.devnull, "w")  # noqa: SIM115
        config.pluginmanager.register(pytest.TerminalReporter(config, silence), "terminalreporter")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what lies in unit/ as pure and what lies in jobs/ as job."""
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    if folder in MARKS:
        item.add_marker(MARKS[folder])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hold pure tests to what they say, and leave out what belongs to another part."""
    for item in items:
        if item.get_closest_marker("pure") and "hvd" in getattr(item, "fixturenames", ()):
            record("failed", item.nodeid, "marked pure, and uses hvd")
            raise pytest.UsageError(f"{item.nodeid} is marked pure, and uses hvd")
        if "output_of" in getattr(item, "fixturenames", ()):
            # The first one of them waits for all programs of a job (support/in_turn.py).
            item.add_marker(pytest.mark.timeout(270))
    if TAKES_TURNS:
        _leave_out(config, items, others_turn(items))
        if SIZE == 1:
            _leave_out(config, items, others_half(items))
    chosen, _, parts = PART.partition("/")
    places = [int(each) - 1 for each in chosen.split(",")]
    # What shares a costly fixture stays in one part.
    units = {item: item.module if item.get_closest_marker("together") else item for item in items}
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units.values()))}
    _leave_out(config, items, [item for item in items if numbers[units[item]] % int(parts) not in places])


def others_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests and modules marked `in_turn` that other commits try."""
    # Only these runs ask git.
    from support.jobs_of_commit import Turn, number_of_commit, tried_by

    groups: dict[str, list[pytest.Item]] = {}
    marks: dict[str, pytest.Mark] = {}
    for item in items:
        for node, mark in islice(item.iter_markers_with_node("in_turn"), 1):
            name = node.nodeid.partition("[")[0]
            groups.setdefault(name, []).append(item)
            marks[name] = mark
    turns = {name: Turn(len(cases), *marks[name].args, **marks[name].kwargs) for name, cases in groups.items()}
    tried = tried_by(number_of_commit(), turns, alone=sum(map(len, groups.values())) == len(items))
    left: list[pytest.Item] = []
    for name, cases in groups.items():
        left.extend(case for case, now in zip(cases, tried[name], strict=True) if not now)
    return left


def others_half(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of every second file of ranks/: one rank runs them in other commits, three ranks in this one."""
    from support.jobs_of_commit import Turn, number_of_commit

    number = number_of_commit()
    files = {item: item.path.relative_to(TESTS) for item in items if not item.get_closest_marker("pure")}
    left = [
        file.parts[0] == "ranks" and not Turn(1, 1, of=2).of_commit(str(file), number)[0] for file in files.values()
    ]
    return [item for item, is_left in zip(files, left, strict=True) if is_left]


def _leave_out(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=others)
    left = set(others)
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare garbage collections what is there for good, torch and thousands of tests: a third of a second each time."""
    gc.freeze()
    # pytest attaches itself to each logger that does not propagate, six times a test; torch has 80 of them.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the test that begins: when the job is ended in it, the tally says so, and where each rank was."""
    if RECORDS:
        record("started", nodeid)
        os.ftruncate(STACKS, 0)
        faulthandler.dump_traceback_later(HANGING_SECONDS, file=STACKS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test; after a failure make sure that the other ranks are not left waiting."""
    if report.failed:
        record("failed", report.nodeid, reason(report))
        if SIZE > 1:
            print(
                f"\nrank {RANK} of {SIZE} failed {report.nodeid} ({report.when})\n{report.longreprtext}",
                file=sys.stderr,
            )
            for title, text in report.sections:
                print(f"--- {title} of rank {RANK}\n{text}", file=sys.stderr)
            sys.stderr.flush()
            wait_for_peers(report.nodeid)
    elif report.passed and report.when == "call":
        record("passed", report.nodeid)
    elif report.skipped:
        record("skipped", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a failed import, and show it on ranks that have no reporter."""
    if report.failed:
        record("failed", report.nodeid, reason(report))
        if RANK > 0:
            print(f"\nrank {RANK} could not collect {report.nodeid}\n{report.longreprtext}", file=sys.stderr)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the job when this rank stopped early: its peers would wait for it in the next test."""
    shutil.rmtree(TEMPORARY, ignore_errors=True)
    if SIZE == 1 and "mpi4py.MPI" in sys.modules:
        # pytest-mpi has started MPI in this process alone, where Open MPI leaves its segment behind.
        from hvlike.transport.host.mpi_library import unlink_start_up_segments

        unlink_start_up_segments(alone=True)
    session = getattr(config, "hvlike_exit_status", pytest.ExitCode.OK)
    if SIZE > 1 and session not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        end_job(f"rank {RANK} stopped before the end of the tests (pytest exit status {int(session)})")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep the exit status for pytest_unconfigure, which runs after the reporter has said why."""
    session.config.hvlike_exit_status = exitstatus


def record(event: str, nodeid: str, text: str = "") -> None:
    """Append one line to this rank's file, at once: the job may be ended in the next moment."""
    if RECORDS:
        with (Path(RECORDS) / f"rank-{RANK}").open("a") as file:
            file.write(f"{event}\t{nodeid}\t{text}\n")


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it failed, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.message} ({Path(crash.path).name}:{crash.lineno})" if crash else report.longreprtext
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def wait_for_peers(nodeid: str) -> None:
    """Go on only when every rank has finished this test too; a rank that still waits inside it would wait for ever."""
    end = time.monotonic() + PEERS_SECONDS
    while RECORDS and time.monotonic() < end:
        if all(has_finished(Path(RECORDS) / f"rank-{rank}", nodeid) for rank in range(SIZE)):
            return
        time.sleep(0.05)
    # Without records nothing is known about the others: leave those that fail too the time to print their report.
    time.sleep(1.0)
    end_job(f"rank {RANK} ends the job: {nodeid} failed here, and other ranks may wait in it for ever")


def has_finished(file: Path, nodeid: str) -> bool:
    """Whether the rank that writes this file has recorded an outcome of the test."""
    lines = file.read_text().splitlines() if file.exists() else []
    return any(f"\t{nodeid}\t" in line and not line.startswith("started\t") for line in lines)


def end_job(reason: str) -> None:
    """End all ranks at once."""
    print(f"\n{reason}", file=sys.stderr, flush=True)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)

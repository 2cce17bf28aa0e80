"""How tests are run: the closing line of scripts/test, checks, cases of a commit, planted faults; scripts/gpu_check."""

import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fuzz.oracle import Absent, Exchange
from support.fuzz.planted import PLANTS, Plant, planted
from support.jobs_of_commit import Turn, cases_of, tried_by

ROOT = Path(__file__).resolve().parents[3]


def load_script(place: str) -> Any:
    """Import a file of scripts/, which is no part of a package."""
    name = Path(place).stem
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / place))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


TALLY = load_script("lib/tally.py")


@pytest.mark.parametrize(
    ("ranks", "status", "expected"),
    [
        pytest.param([["passed a", "passed b"], ["passed a", "passed b"]], 0, (2, 0, 0), id="a test counts once"),
        pytest.param([["passed a", "skipped b"]], 0, (1, 0, 1), id="skipped tests are no passed tests"),
        pytest.param([["passed a", "passed b"], ["passed a", "failed b"]], 1, (1, 1, 0), id="failed on one rank"),
        pytest.param([["failed a"], ["failed a"]], 1, (0, 1, 0), id="failed on every rank counts once"),
        pytest.param([["failed a", "failed a"]], 1, (0, 1, 0), id="failed and torn down badly counts once"),
        pytest.param([["passed a"]], 137, (1, 1, 0), id="the run broke off"),
        pytest.param([], 0, (0, 1, 0), id="nothing was executed"),
        pytest.param([["skipped a"]], 0, (0, 1, 1), id="everything was skipped"),
    ],
)
def test_a_run(tmp_path: Path, ranks: list[list[str]], status: int, expected: tuple[int, int, int]) -> None:
    write_run(tmp_path, ranks, status)
    outcome = TALLY.tally(tmp_path)
    assert (outcome.passed, outcome.failed, outcome.skipped) == expected


def test_the_closing_line_sums_runs_and_broken_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", [["passed a"]], 0)
    write_run(tmp_path / "two", [["passed a", "failed b"]], 1)
    (tmp_path / "mypy.broken").touch()
    assert TALLY.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 2 failed"


def test_failed_tests_are_named_before_the_closing_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "three", [["failed t::a sum"], ["failed t::a sum"], ["failed t::a product"]], 1)
    (tmp_path / "mypy.broken").touch()
    TALLY.main(tmp_path)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "FAILED three: t::a, rank 0, 1: sum",
        "FAILED three: t::a, rank 2: product",
        "FAILED mypy: failed",
        "0 passed, 2 failed",
    ]


def test_a_run_that_broke_off_says_where_each_rank_was(tmp_path: Path) -> None:
    write_run(tmp_path, [["started a", "passed a", "started b"], ["started a", "passed a"]], 1)
    stacks = """Timeout (0:01:50)!
Thread 0x00007f (most recent call first):
  File "/x/helper.py", line 9 in help

Thread 0x00008f (most recent call first):
  File "/x/doorbell.py", line 3 in wait
  File "/x/loop.py", line 40 in drive
"""
    (tmp_path / "stacks-0").write_text(stacks)
    assert TALLY.tally(tmp_path).failures == (
        "b, rank 0: did not end, hung at wait (doorbell.py:3) < drive (loop.py:40)",
        "ended with 1 after 1 passed tests",
    )


def test_many_failures_leave_room_in_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", [[f"failed t{number}" for number in range(100)]], 1)
    TALLY.main(tmp_path)
    assert len(capsys.readouterr().out.splitlines()) < 40


def write_run(folder: Path, ranks: list[list[str]], status: int) -> None:
    """Write what a run leaves behind."""
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        records = ["\t".join([*line.split(), ""][:3]) for line in lines]
        (folder / f"rank-{rank}").write_text("".join(record + "\n" for record in records))
    (folder / "exit-status").write_text(f"{status}\n")


@pytest.mark.parametrize(("cases", "tried"), [(14, 5), (4, 2), (5, 2), (3, 1), (1, 1)])
def test_commits_in_a_row_come_to_all_cases(cases: int, tried: int) -> None:
    chosen = [cases_of(number, cases, tried) for number in range(cases)]
    assert all(len(each) == tried for each in chosen)
    assert set.union(*chosen) == set(range(cases))


def test_of_fewer_cases_all_are_tried() -> None:
    assert cases_of(7, 2, 5) == {0, 1}


def test_a_test_that_counts_as_one_of_several_is_tried_by_some_commits() -> None:
    tried = [Turn(1, 2, of=5).of_commit("a test", number)[0] for number in range(5)]
    assert sum(tried) == 2
    assert Turn(3, 3).of_commit("a test", 0) == [True] * 3


def test_where_it_is_the_turn_of_none_a_run_still_tries_one() -> None:
    turns = {name: Turn(1, 1, of=4) for name in "abc"}
    beside_others = [tried_by(number, turns, alone=False) for number in range(12)]
    alone = [tried_by(number, turns, alone=True) for number in range(12)]
    assert not all(any(cases for (cases,) in tried.values()) for tried in beside_others)
    assert all(any(cases for (cases,) in tried.values()) for tried in alone)
    assert [now for was, now in zip(beside_others, alone, strict=True) if [True] in was.values()] == [
        was for was in beside_others if [True] in was.values()
    ]


@pytest.mark.parametrize("fault", PLANTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Plant) -> None:
    assert not fault.missing()
    with planted(fault) as folder:
        for file, _, new in fault.changes:
            assert new in (folder / "hvlike" / file).read_text()


RANKS = (0, 1)


def test_all_get_what_all_bring_and_by_number() -> None:
    exchange = Exchange(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(lambda rank=rank: [exchange.gather(rank, (rank, each), RANKS) for each in range(100)])
            for rank in RANKS
        )
    assert first.result() == second.result() == [[(0, each), (1, each)] for each in range(100)]


def test_what_a_rank_has_brought_stays_when_it_leaves() -> None:
    exchange = Exchange(2)
    came: list[Any] = []
    other = threading.Thread(target=lambda: came.append(exchange.gather(1, "from 1", RANKS)))
    other.start()
    assert exchange.gather(0, "from 0", RANKS) == ["from 0", "from 1"]
    exchange.leave(0)
    other.join()
    assert came == [["from 0", "from 1"]]
    with pytest.raises(Absent):
        exchange.gather(1, "again", RANKS)


def test_a_rank_that_left_is_absent_only_from_its_own_sets() -> None:
    exchange = Exchange(3)
    exchange.leave(2)
    assert exchange.gather(1, "alone", (1,)) == ["alone"]
    with pytest.raises(Absent):
        exchange.gather(1, "with 2", (1, 2))


def test_every_check_is_defined_and_run_by_pre_commit_and_no_other() -> None:
    checks = (ROOT / "scripts" / "lib" / "checks.sh").read_text()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    found = re.search(r"^checks=\((.*)\)$", checks, flags=re.MULTILINE)
    assert found
    listed = shlex.split(found[1])
    assert all(f'    "{check}") ' in checks for check in listed)
    entries = [shlex.split(entry) for entry in re.findall(r"^ +entry: (.*)$", hooks, flags=re.MULTILINE)]
    assert [entry[:2] for entry in entries] == [["scripts/check", check] for check in listed]


@pytest.mark.parametrize("script", ["test", "check", "docs"])
def test_the_scripts_take_the_checks_from_there(script: str) -> None:
    text = (ROOT / "scripts" / script).read_text()
    assert "lib/checks.sh" in text
    assert "ruff" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE)


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child", os.getpid(), flush=True)
if os.fork() == 0:
    os.setsid()
    print("grandchild", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_script("gpu_check")
    monkeypatch.setattr(module, "machine", lambda: {"gpus": 1})
    monkeypatch.setattr(module, "GRACE", 0.3)
    monkeypatch.setattr(module, "MINIMUM", 0.0)
    return module


def part(script: Any, name: str, code: str, seconds: float = 60.0) -> Any:
    return script.Part(name, seconds, 0, ["-c", code])


def summary(folder: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads((folder / "summary.json").read_text())["parts"]}


def test_a_part_that_hangs_is_ended_with_all_its_processes(script: Any, tmp_path: Path) -> None:
    check = script.Check(tmp_path, 5.0, 1)
    outcome = check.run(part(script, "stubborn", STUBBORN, 1.5))
    assert outcome.status == "out of time"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    pids = [int(line.split()[1]) for line in lines if line.startswith(("child ", "grandchild "))]
    assert len(pids) == 2
    until = time.monotonic() + 20.0
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until, "a process of the part goes on"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_each_result_is_there_once_its_part_has_ended(script: Any, tmp_path: Path) -> None:
    check = script.Check(tmp_path, 5.0, 1)
    check.run(part(script, "good", "print('well')"))
    assert summary(tmp_path)["good"]["status"] == "passed"
    check.run(part(script, "bad", "raise SystemExit('no good')"))
    found = summary(tmp_path)
    assert found["bad"]["status"] == "failed"
    assert found["bad"]["last_lines"] == ["no good"]
    assert "well" in (tmp_path / "log.txt").read_text()


def test_what_no_time_is_left_for_is_not_begun(script: Any, tmp_path: Path) -> None:
    check = script.Check(tmp_path, 0.0, 1)
    assert check.run(part(script, "late", "print('begun')")).status == "not run"
    assert "begun" not in (tmp_path / "log.txt").read_text()


def test_ranks_that_share_a_gpu_are_hosts_of_their_own(script: Any, tmp_path: Path) -> None:
    shared = script.Part("shared", 1.0, 2, ["-c", ""])
    assert "NCCL_HOSTID" in " ".join(script.Check(tmp_path, 1.0, 1).command_of(shared))
    assert "NCCL_HOSTID" not in " ".join(script.Check(tmp_path, 1.0, 2).command_of(shared))


def test_a_part_that_is_not_known_is_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--only", "ncll"])
    assert script.main() == 2
    assert "no part ncll; there are nccl_alone" in capsys.readouterr().out


def test_programs_of_the_parts_are_there(script: Any) -> None:
    for each in script.parts(2):
        assert all(os.path.exists(ROOT / word) for word in each.command if word.endswith(".py"))

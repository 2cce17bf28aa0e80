"""scripts/gpu_check ends in time whatever its parts do, and keeps what it knows."""

import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_check"
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
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "machine", lambda: {"gpus": 1})
    monkeypatch.setattr(module, "GRACE", 0.3)
    monkeypatch.setattr(module, "MINIMUM", 0.0)
    return module


def part(script: ModuleType, name: str, code: str, seconds: float = 60.0) -> Any:
    return script.Part(name, seconds, 0, ["-c", code])


def summary(folder: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads((folder / "summary.json").read_text())["parts"]}


def test_a_part_that_hangs_is_ended_with_all_its_processes(script: ModuleType, tmp_path: Path) -> None:
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


def test_each_result_is_there_once_its_part_has_ended(script: ModuleType, tmp_path: Path) -> None:
    check = script.Check(tmp_path, 5.0, 1)
    check.run(part(script, "good", "print('well')"))
    assert summary(tmp_path)["good"]["status"] == "passed"
    check.run(part(script, "bad", "raise SystemExit('no good')"))
    found = summary(tmp_path)
    assert found["bad"]["status"] == "failed"
    assert found["bad"]["last_lines"] == ["no good"]
    assert "well" in (tmp_path / "log.txt").read_text()


def test_what_no_time_is_left_for_is_not_begun(script: ModuleType, tmp_path: Path) -> None:
    check = script.Check(tmp_path, 0.0, 1)
    assert check.run(part(script, "late", "print('begun')")).status == "not run"
    assert "begun" not in (tmp_path / "log.txt").read_text()


def test_ranks_that_share_a_gpu_are_hosts_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    shared = script.Part("shared", 1.0, 2, ["-c", ""])
    assert "NCCL_HOSTID" in " ".join(script.Check(tmp_path, 1.0, 1).command_of(shared))
    assert "NCCL_HOSTID" not in " ".join(script.Check(tmp_path, 1.0, 2).command_of(shared))


def test_a_part_that_is_not_known_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--only", "ncll"])
    assert script.main() == 2
    assert "no part ncll; there are nccl_alone" in capsys.readouterr().out


def test_programs_of_the_parts_are_there(script: ModuleType) -> None:
    for each in script.parts(2):
        assert all(os.path.exists(SCRIPT.parents[1] / word) for word in each.command if word.endswith(".py"))

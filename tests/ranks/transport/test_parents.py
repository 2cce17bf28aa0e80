"""A process notices that the launcher above it is gone, also through a shell."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvlike.transport.host import launchers

# The module alone starts in milliseconds. Says "watching", then "orphan" when it sees that it is one.
WATCHER = f"""
import sys, time
sys.path.insert(0, {str(Path(launchers.__file__).parent)!r})
import parents
watch = parents.ParentWatch()
print("watching", watch.is_orphan(), flush=True)
until = time.monotonic() + 30
while not watch.is_orphan() and time.monotonic() < until:
    time.sleep(0.01)
print("orphan", watch.is_orphan(), flush=True)
"""

# A launcher that starts a command and waits for it.
LAUNCHER = "import subprocess, sys; subprocess.call(sys.argv[1:])"


def test_a_process_with_its_launcher_is_no_orphan() -> None:
    watch = launchers.LauncherWatch()
    assert not watch.is_orphan()


@pytest.mark.job
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="shells are recognised in /proc")
@pytest.mark.parametrize("shells", [0, 1, 2])
def test_the_death_of_the_launcher_is_noticed(shells: int) -> None:
    command = [sys.executable, "-c", WATCHER]
    for _ in range(shells):
        # A shell that has something left to do stays as a parent.
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "watching False\n"
        os.kill(launcher.pid, signal.SIGKILL)
        assert launcher.stdout.readline() == "orphan True\n"


def test_the_chain_ends_at_the_first_parent_that_is_no_shell() -> None:
    processes = {
        10: launchers._ParentProcess("bash", 9),
        9: launchers._ParentProcess("sh", 8),
        8: launchers._ParentProcess("mpirun", 7),
        7: launchers._ParentProcess("bash", 6),
    }
    # Nothing of the process is replaced: its own watch, in another thread, would find itself an orphan and end it.
    watch = launchers.LauncherWatch(lambda: 10, processes.get)
    assert watch._chain == (10, 9, 8)
    assert not watch.is_orphan()
    processes[8] = launchers._ParentProcess("mpirun", 1)  # nohup: mpirun has another parent, and lives
    assert not watch.is_orphan()
    processes[9] = launchers._ParentProcess("sh", 1)  # mpirun is gone
    assert watch.is_orphan()


def test_names_with_blanks_and_parentheses_are_read() -> None:
    assert launchers._parse_stat("42 (a (b) c) S 7 42 42 0") == launchers._ParentProcess("a (b) c", 7)
    assert launchers._read_process(os.getpid()) == launchers._ParentProcess(
        Path("/proc/self/comm").read_text().rstrip("\n"), os.getppid()
    )

"""A process notices that the launcher above it is gone, also through a shell."""

import os
from pathlib import Path

from hvlike.transport.host import launchers


def test_a_process_with_its_launcher_is_no_orphan() -> None:
    watch = launchers.LauncherWatch()
    assert not watch.is_orphan()


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

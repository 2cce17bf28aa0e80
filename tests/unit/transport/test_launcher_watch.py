"""A process notices that the launcher above it is gone, also through a shell."""

import os
from pathlib import Path

from hvlike.transport.host import parents


def test_a_process_with_its_launcher_is_no_orphan() -> None:
    watch = parents.LauncherWatch()
    assert not watch.is_orphan()


def test_the_chain_ends_at_the_first_parent_that_is_no_shell() -> None:
    processes = {
        10: parents.ParentProcess("bash", 9),
        9: parents.ParentProcess("sh", 8),
        8: parents.ParentProcess("mpirun", 7),
        7: parents.ParentProcess("bash", 6),
    }
    # Nothing of the process is replaced: its own watch, in another thread, would find itself an orphan and end it.
    watch = parents.LauncherWatch(lambda: 10, processes.get)
    assert watch.chain == (10, 9, 8)
    assert not watch.is_orphan()
    processes[8] = parents.ParentProcess("mpirun", 1)  # nohup: mpirun has another parent, and lives
    assert not watch.is_orphan()
    processes[9] = parents.ParentProcess("sh", 1)  # mpirun is gone
    assert watch.is_orphan()


def test_names_with_blanks_and_parentheses_are_read() -> None:
    assert parents.parse_stat("42 (a (b) c) S 7 42 42 0") == parents.ParentProcess("a (b) c", 7)
    assert parents.read_process(os.getpid()) == parents.ParentProcess(
        Path("/proc/self/comm").read_text().rstrip("\n"), os.getppid()
    )

"""What exit handlers are told of the status of sys.exit, and the program ends with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hvlike.transport.failure import exit_status

# The module alone, without the package around it, so that each program starts in milliseconds.
PREAMBLE = f"""
import atexit, sys, threading
sys.path.insert(0, {str(Path(exit_status.__file__).parent)!r})
import exit_status
observer = exit_status.ExitObserver(lambda status: print("asked", status))
observer.install()
atexit.register(lambda: print("recorded", observer.status))
def caught(*args):
    try:
        sys.exit(*args)
    except SystemExit as error:
        return error
"""

# program, its status, its stdout, its stderr
ENDINGS = [
    ("pass", 0, "recorded None", ""),
    ("sys.exit()", 0, "asked 0|recorded 0", ""),
    ("sys.exit(None)", 0, "asked 0|recorded 0", ""),
    ("sys.exit(0)", 0, "asked 0|recorded 0", ""),
    ("sys.exit(7)", 7, "asked 7|recorded 7", ""),
    ("sys.exit(-1)", 255, "asked 255|recorded 255", ""),
    ("sys.exit(256)", 0, "asked 0|recorded 0", ""),
    ("sys.exit(True)", 1, "asked 1|recorded 1", ""),
    ("sys.exit('a text')", 1, "asked 1|recorded 1", "a text"),
    ("sys.exit((1, 2))", 1, "asked 1|recorded 1", "(1, 2)"),
    ("try:\n  1 / 0\nexcept ZeroDivisionError:\n  sys.exit(3)", 3, "asked 3|recorded 3", ""),
    ("try:\n  sys.exit(3)\nfinally:\n  print('finally')", 3, "finally|asked 3|recorded 3", ""),
    ("caught(3).code", 0, "recorded None", ""),
    ("raise caught(3)", 3, "asked 3|recorded 3", ""),
    ("error = caught(3); error.code = 9; raise error", 9, "asked 9|recorded 9", ""),
    ("caught(3); sys.exit(4)", 4, "asked 4|recorded 4", ""),
    ("observer.uninstall(); sys.exit(5)", 5, "recorded None", ""),
    # The three that are not seen, as the module says.
    ("raise SystemExit(3)", 3, "recorded None", ""),
    ("exit(3)", 3, "recorded None", ""),
    ("sys.exit(SystemExit(3))", 3, "recorded None", ""),
    ("t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0, "recorded None", ""),
]


@pytest.mark.parametrize(("program", "status", "stdout", "stderr"), ENDINGS)
def test_endings(program: str, status: int, stdout: str, stderr: str) -> None:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stdout.splitlines() == stdout.split("|")
    assert done.stderr.strip() == stderr


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_and_a_module(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "program.py").write_text(PREAMBLE + "sys.exit(7)")
    command = [sys.executable, *(["-m", "program"] if as_module else ["program.py"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (7, ["asked 7", "recorded 7"])

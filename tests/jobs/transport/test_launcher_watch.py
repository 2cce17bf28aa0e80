"""A process notices that the launcher above it is gone, whatever stands between them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hvlike

# Without the rest of hvlike it starts in milliseconds. Says "watching", then "orphan" when it sees that it is one.
WATCHER = f"""
import sys, time, types
package = sys.modules["hvlike"] = types.ModuleType("hvlike")
package.__path__ = [{str(Path(hvlike.__file__).parent)!r}]
from hvlike.transport.host.parents import LauncherWatch
watch = LauncherWatch()
print("watching", watch.is_orphan(), flush=True)
until = time.monotonic() + 30
while not watch.is_orphan() and time.monotonic() < until:
    time.sleep(0.01)
print("orphan", watch.is_orphan(), flush=True)
"""

# A launcher that starts a command, tells it which rank it is, and waits for it.
LAUNCHER = "import os, subprocess, sys; subprocess.call(sys.argv[1:], env={**os.environ, 'PMI_RANK': '1'})"
WAITS = {
    # A shell that has something left to do stays as a parent.
    "shell": ["sh", "-c", '"$@"; true', "sh"],
    "python": [sys.executable, "-c", "import subprocess, sys; subprocess.call(sys.argv[1:])"],
    "timeout": ["timeout", "60"],
}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="what stands between is found in /proc")
@pytest.mark.parametrize("between", [[], ["shell"], ["python"], ["timeout"], ["python", "shell"]], ids=str)
def test_the_death_of_the_launcher_is_noticed(between: list[str]) -> None:
    command = [word for each in between for word in WAITS[each]] + [sys.executable, "-c", WATCHER]
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "watching False\n"
        os.kill(launcher.pid, signal.SIGKILL)
        assert launcher.stdout.readline() == "orphan True\n"

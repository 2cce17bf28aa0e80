"""A process that has vanished is noticed once; one that cannot be seen is not watched."""

import subprocess
import sys

from hvlike.transport.failure.watchdog import Liveness


def test_a_vanished_process_is_reported_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        liveness = Liveness({5: child.pid})
        assert liveness.lost() == []
        child.kill()
    assert liveness.lost() == [5]
    assert liveness.lost() == []


def test_a_process_that_could_not_be_seen_at_the_start_is_not_watched() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert Liveness({0: child.pid}).lost() == []

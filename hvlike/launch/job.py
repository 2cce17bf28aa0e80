"""A job as a child process: its output goes where the output of this process goes, and it never outlives its caller."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TextIO

GRACE_SECONDS = 10.0
_DRAIN_SECONDS = 10.0
_CHARACTERS_KEPT = 20_000


class Pump:
    """Copies what a job prints to this process's own stream, as it comes, and remembers the end of it.

    Not by handing down the file: in a notebook that would lead to the terminal of the server.
    """

    def __init__(self, source: IO[bytes], stream: Callable[[], TextIO | None]) -> None:
        """stream: where to print now; a notebook changes that."""
        self._source = source
        self._stream = stream
        self._kept: deque[str] = deque()
        self._length = 0
        self._thread = threading.Thread(target=self._copy, name="hvlike-output", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Wait for the rest, but not for ever: a process that outlives its launcher keeps the pipe open."""
        self._thread.join(_DRAIN_SECONDS)
        return "".join(self._kept)

    def _copy(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while data := os.read(self._source.fileno(), 1 << 16):
            text = decode(data)
            self._kept.append(text)
            self._length += len(text)
            while self._length - len(self._kept[0]) > _CHARACTERS_KEPT:
                self._length -= len(self._kept.popleft())
            stream = self._stream()
            if stream is not None:
                stream.write(text)
                stream.flush()


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], timeout: float | None) -> tuple[int, str]:
    """Run a launcher; returns its exit status and the end of what came on stderr. Blocks.

    The job is ended when this is interrupted, and after `timeout` seconds.
    Raises: subprocess.TimeoutExpired.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        # Ctrl-C reaches this process alone, which then ends the job in order.
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        output = Pump(process.stdout, lambda: sys.stdout)
        errors = Pump(process.stderr, lambda: sys.stderr)
        try:
            process.wait(timeout)
        finally:
            stop(process)
            output.finish()
            said = errors.finish()
    return process.returncode, said


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks, if it still runs."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except BaseException as error:
        # Also after a second Ctrl-C.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise

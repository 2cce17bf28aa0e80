"""The program of the matrix of ends: rank 1 fails in a chosen way behind streams of a chosen kind; the others go on.

ends_program.py HOW STREAMS START FOLDER. Run as it is on every rank; with START "run" it is the caller of hvd.run.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

STEPS = 20


class Tee:
    """Copies to a file, as programs do: neither `closed` nor `fileno`."""

    def __init__(self, screen: Any, file: Any) -> None:
        self.screen, self.file = screen, file

    def write(self, text: str) -> None:
        self.screen.write(text)
        self.file.write(text)

    def flush(self) -> None:
        self.screen.flush()
        self.file.flush()


class WithoutFlush:
    def __init__(self, screen: Any) -> None:
        self.screen = screen

    def write(self, text: str) -> None:
        self.screen.write(text)


class Failure(BaseException):
    """Nothing that `except Exception` stops."""


class Raising:
    def __getattr__(self, name: str) -> NoReturn:
        raise Failure(name)


def broken_pipe() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed() -> Any:
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    return stream


def replacement(kind: str, screen: Any, folder: Path) -> Any:
    """What stands in place of a stream."""
    if kind == "a full disk":
        return Tee(screen, open("/dev/full", "w"))
    makers = {
        "plain": lambda: screen,
        "Tee without closed": lambda: Tee(screen, open(folder / f"log-{os.getpid()}", "w")),  # noqa: SIM115
        "no flush": lambda: WithoutFlush(screen),
        "closed": closed,
        "ASCII only": lambda: open(screen.fileno(), "w", encoding="ascii", closefd=False),  # noqa: SIM115
        "None": lambda: None,
        "raising": Raising,
        "a broken pipe": broken_pipe,
    }
    return makers[kind]()


def fail(how: str) -> None:
    """Fail like this; returns where another process does it from outside."""
    os.write(1, f"END {time.time()}\n".encode())
    if how == "raise":
        raise ValueError("boom größe")
    if how == "exit status":
        sys.exit(7)
    if how == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if how == "thread":
        threading.Thread(target=lambda: 1 / 0, name="loader").start()
    if how == "MemoryError":
        bytearray(1 << 60)
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "leaves":
        sys.exit(0)
    numbers = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
    if how in numbers:
        os.kill(os.getpid(), numbers[how])
    time.sleep(0.2 if how == "thread" else 0)


def work(how: str, streams: str, start: str, place: str) -> None:
    """What each rank does."""
    import torch

    import hvlike as hvd

    folder = Path(place)
    hvd.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/shm/" in line and not line.endswith("(deleted)"):
            os.write(1, f"SHARED {line.split()[-1]}\n".encode())
    sys.stdout = replacement(streams, sys.stdout, folder)
    sys.stderr = replacement(streams, sys.stderr, folder)
    born = hvd.rank()
    again = (folder / "failed").exists()
    hvd.barrier()

    def step(state: Any) -> None:
        while state.step < STEPS or not again:
            hvd.allreduce(torch.ones(3), name="step")
            state.step += 1
            state.commit()
            if state.step == 5 and born == 1 and not again:
                (folder / "failed").touch()
                os.write(1, b"ready\n")
                fail(how)
            if hvd.size() == 2 and start == "ulfm" and state.step > STEPS:
                return

    state = hvd.elastic.ObjectState(step=0)
    if start == "ulfm":
        hvd.elastic.run(step)(state)
    else:
        step(state)
    # Python itself ends with 120 where these cannot be flushed.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    os.write(1, b"done\n")


def main() -> None:
    how, streams, start, place = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if start == "run":
        import hvlike as hvd

        sys.executable = str(Path(place) / "python")
        hvd.run(work, (how, streams, start, place))
    else:
        work(how, streams, start, place)


if __name__ == "__main__":
    main()

"""What autotuning tells the user: a CSV file of the samples, a line with the winner, a file of knobs to load."""

from __future__ import annotations

import sys
from pathlib import Path

from hvlike.errors import UsageError
from hvlike.training.autotune.candidates import Choice

COLUMNS = ("sample", "warmup", "bucket_bytes", "first_bucket_bytes", "cycle_time_ms", "seconds_per_step")
"""Of the CSV file: number of the sample from 1, whether it was thrown away (0 or 1), the setting, and the median time
of a step on the slowest rank."""


class Report:
    """Writes on the first rank of the set; nothing on others."""

    def __init__(self, log: str | None, file: str | None) -> None:
        """log: path of the CSV file; file: path of the file of knobs; None for none.

        Raises: UsageError when one of them cannot be written, before any time is spent on tuning.
        """
        self._log = log
        self._file = file
        self._samples = 0
        if log is not None:
            _write("HVLIKE_AUTOTUNE_LOG", log, ",".join(COLUMNS) + "\n", "w")
        if file is not None:
            _write("HVLIKE_AUTOTUNE_FILE", file, "", "a")

    def sample(self, choice: Choice, seconds: float, *, warmup: bool) -> None:
        """One more sample."""
        self._samples += 1
        if self._log is None:
            return
        values = (self._samples, int(warmup), choice.bucket_bytes, choice.first_bucket_bytes)
        times = (f"{choice.cycle_microseconds / 1000:g}", f"{seconds:.9f}")
        _write("HVLIKE_AUTOTUNE_LOG", self._log, ",".join([*map(str, values), *times]) + "\n", "a")

    def winner(self, choice: Choice, seconds: float, start_seconds: float) -> None:
        """The search is over: say what stays."""
        found = f"{choice.describe()}: {1000 * seconds:.3f} ms a step, {1000 * start_seconds:.3f} ms at the start"
        where = "" if self._file is None else f"; load it with HVLIKE_KNOBS_FILE={self._file}"
        print(f"hvlike autotune: {found}{where}", file=sys.stderr, flush=True)
        if self._file is not None:
            lines = [f"# {found}", *knob_lines(choice)]
            _write("HVLIKE_AUTOTUNE_FILE", self._file, "".join(f"{line}\n" for line in lines), "w")


def knob_lines(choice: Choice) -> list[str]:
    """The setting as lines NAME=value."""
    return [
        f"HVLIKE_BUCKET_BYTES={choice.bucket_bytes}",
        f"HVLIKE_FIRST_BUCKET_BYTES={choice.first_bucket_bytes}",
        f"HVLIKE_CYCLE_TIME={choice.cycle_microseconds / 1000:g}",
    ]


def _write(knob: str, path: str, text: str, mode: str) -> None:
    try:
        with Path(path).open(mode) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{knob}={path}: the file cannot be written: {error}.") from None

"""Sizes as people write them: 64KiB, 1.5MiB, 400M."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return bytes; units are powers of 1024. Raises: argparse.ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64KiB or 25MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_sizes(text: str) -> list[int]:
    """Return a list of bytes from sizes separated by commas. Raises: argparse.ArgumentTypeError."""
    return [parse_size(each) for each in text.split(",")]


def format_size(size: int) -> str:
    """Return a size with the largest unit in which it is at least 1."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits in us, ms or s."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"

"""Options that several benchmarks share."""

from __future__ import annotations

import argparse

from hvlike.observe.picture import png


def add_common(parser: argparse.ArgumentParser, repetitions: str, *, horovod: bool = True) -> None:
    """Add --repetitions, --no-horovod, --seed, --json and --plot.

    repetitions: what the default is, in words. horovod: whether it could take part.
    """
    parser.add_argument("--repetitions", type=positive, help=f"default: {repetitions}")
    if horovod:
        parser.add_argument("--no-horovod", action="store_true", help="leave Horovod out where it is installed")
    parser.add_argument("--seed", type=int, default=0, help="draws everything random; default 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", type=png, metavar="FILE.png", help="draw what came out; needs matplotlib")


def add_bare(parser: argparse.ArgumentParser) -> None:
    """Add --bare."""
    parser.add_argument("--bare", action="store_true", help="beside a loop of numpy calls and no more; two ranks")


def add_device(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --device. what: is measured there."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"where {what} is; default cpu")


def left_out(by_hand: bool, option: str) -> str | None:
    """Why a contestant is left out, if the user wants it so."""
    return f"left out by {option}" if by_hand else None


def positive(text: str) -> int:
    """Return a whole number above 0. Raises: argparse.ArgumentTypeError."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number

"""The knobs: every environment variable hvlike reads, in one table, read once by init()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvlike.errors import UsageError


@dataclass(frozen=True)
class Knobs:
    """The values of this run."""

    ranks_per_node: int | None = None
    """HVLIKE_RANKS_PER_NODE: treat every so many ranks of a host as a node of their own (to try multi-node code)."""
    init_patience: float = 60.0
    """HVLIKE_INIT_PATIENCE_SECONDS: how long init() waits for other ranks before it says so."""
    stall_check_seconds: float = 60.0
    """HVLIKE_STALL_CHECK_TIME_SECONDS: how long a rank may wait for others before the log says for whom."""
    overlap: bool | None = None
    """HVLIKE_OVERLAP: 1 to reduce gradients beside backward, 0 to do it after; unset: 1 where a core is spare."""


def read_knobs(environment: Mapping[str, str]) -> Knobs:
    """The knobs set in `environment`, the others at their defaults.

    Raises: UsageError for a value that is no number or out of range; the text names variable and value.
    """
    ranks = _number(environment, "HVLIKE_RANKS_PER_NODE", least=1)
    patience = _number(environment, "HVLIKE_INIT_PATIENCE_SECONDS", least=0.001)
    if ranks is not None and ranks != int(ranks):
        raise UsageError(f"HVLIKE_RANKS_PER_NODE={ranks}: expected a whole number.")
    stall = _number(environment, "HVLIKE_STALL_CHECK_TIME_SECONDS", least=1)
    return Knobs(
        ranks_per_node=None if ranks is None else int(ranks),
        init_patience=Knobs.init_patience if patience is None else patience,
        overlap=_switch(environment, "HVLIKE_OVERLAP"),
        stall_check_seconds=Knobs.stall_check_seconds if stall is None else stall,
    )


def _number(environment: Mapping[str, str], name: str, *, least: float) -> float | None:
    text = environment.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r}: expected a number.") from None
    if not value >= least:
        raise UsageError(f"{name}={text!r}: expected at least {least:g}.")
    return value


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    text = environment.get(name, "")
    if text not in ("", "0", "1"):
        raise UsageError(f"{name}={text!r}: expected 0 or 1.")
    return text == "1" if text else None

"""What named operations and remote calls took, from timelines: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvlike.observe.spans import RankTrace, Span

_ASKED = "NEGOTIATE_"


@dataclass(frozen=True)
class Operations:
    """All operations of one kind, on all ranks together; times in milliseconds, on average."""

    kind: str
    count: int
    bytes: int
    agreement: float
    """From the call until all ranks had called."""
    queue: float
    execution: float
    longest_agreement: float


@dataclass(frozen=True)
class Calls:
    """Remote calls of one function; times in milliseconds."""

    what: str
    """"call", from the call to the answer; "queue", "run" and "later": of those who serve it."""
    function: str
    count: int
    mean: float
    longest: float


def operations(traces: Sequence[RankTrace]) -> list[Operations]:
    """What was agreed by name, by kind; what took the most time in all first."""
    kinds: dict[str, dict[str, list[Span]]] = {}
    for trace in traces:
        for spans in trace.rows.values():
            kind = next((span.name.removeprefix(_ASKED) for span in spans if span.name.startswith(_ASKED)), None)
            if kind is not None:
                phases = kinds.setdefault(kind.lower(), {})
                for span in spans:
                    phases.setdefault(span.name, []).append(span)
    found = []
    for kind, phases in kinds.items():
        asked, queued, run = (phases.get(name, []) for name in (f"{_ASKED}{kind.upper()}", "QUEUE", kind.upper()))
        found.append(
            Operations(
                kind,
                len(asked),
                sum(span.arguments.get("bytes", 0) for span in asked),
                _mean(asked),
                _mean(queued),
                _mean(run),
                max((span.length for span in asked), default=0.0) / 1000,
            )
        )
    return sorted(found, key=lambda each: each.count * (each.agreement + each.queue + each.execution), reverse=True)


def calls(traces: Sequence[RankTrace]) -> list[Calls]:
    """Remote calls by function; what took the most time in all first."""
    spans: dict[tuple[str, str], list[Span]] = {}
    for trace in traces:
        for title, row in trace.matching("rpc "):
            for span in row:
                if span.depth == 0:
                    what = "call" if title.startswith("calls") else span.name.lower()
                    spans.setdefault((what, str(span.arguments.get("function", span.name))), []).append(span)
    found = [
        Calls(what, function, len(each), _mean(each), max(span.length for span in each) / 1000)
        for (what, function), each in spans.items()
    ]
    return sorted(found, key=lambda each: each.count * each.mean, reverse=True)


def _mean(spans: Iterable[Span]) -> float:
    lengths = [span.length for span in spans]
    return sum(lengths) / len(lengths) / 1000 if lengths else 0.0

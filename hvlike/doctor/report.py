"""The answers for people, and for programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter

import hvlike
from hvlike.doctor.case import Case
from hvlike.doctor.finding import Verdict
from hvlike.doctor.ladder import Answer, has_failed

_WIDTH = 118
_NAME = 14
_LONGEST = 24


def as_text(case: Case, answers: list[Answer]) -> str:
    """The ladder: what each rung found, and what to do."""
    ranks, nodes = len(case.ranks), len(case.nodes)
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    if case.unmet:
        where = f"one of {case.unmet} ranks, which did not come together"
    lines = [f"hvlike {hvlike.__version__} doctor: {where}", ""]
    for answer in answers:
        lines += _rung(answer)
    counts = Counter(each.finding.verdict for each in answers)
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    ending = "something has to be mended, see FAIL" if has_failed(answers) else "nothing stands in the way of a job"
    return "\n".join([*lines, "", f"{told}: {ending}"])


def _rung(answer: Answer) -> list[str]:
    finding = answer.finding
    head = f"{finding.verdict.value:>4}  {answer.rung:{_NAME}}"
    margin = " " * len(head)
    lines: list[str] = []
    for text in shortened([line for line in finding.found if line]) or [""]:
        first = margin if lines else head
        lines += _wrap(text, first, margin + "  ")
    for text in finding.advice:
        lines += _wrap(text, margin + "-> ", margin + "   ")
    return [line.rstrip() for line in lines]


def shortened(found: list[str]) -> list[str]:
    """What a screen takes of a job on very many hosts."""
    if len(found) <= _LONGEST:
        return found
    return [*found[:_LONGEST], f"... {len(found) - _LONGEST} lines more: --json has all"]


def _wrap(text: str, first: str, others: str) -> list[str]:
    """Lines of at most _WIDTH characters; paths and options are to be copied, so words stay whole."""
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first]


def as_json(case: Case, answers: list[Answer]) -> str:
    """One object: version, ranks, nodes, ok, and the rungs in their order."""
    rungs = [
        {
            "rung": each.rung,
            "verdict": each.finding.verdict.value,
            "found": [line for line in each.finding.found if line],
            "advice": list(each.finding.advice),
        }
        for each in answers
    ]
    return json.dumps(
        {
            "hvlike": hvlike.__version__,
            "ranks": len(case.ranks),
            "nodes": len(case.nodes),
            "ok": not has_failed(answers),
            "rungs": rungs,
        },
        indent=1,
    )


def in_one_line(where: str, answers: list[Answer]) -> str:
    """The first failure of a rank that rank 0 could not ask, and how to see all."""
    first = next(each for each in answers if each.finding.verdict is Verdict.FAIL)
    found = "; ".join(line for line in first.finding.found if line and not line.startswith("| "))
    return f"{where}: FAIL {first.rung}: {found} (rank 0 prints the whole ladder)"

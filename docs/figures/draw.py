"""Draw the figures of the pages: python docs/figures/draw.py writes all of them beside this file.

Each is what two or three parties do, from top to bottom: notes on a party's line, arrows between lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent

LANE_WIDTH = 360
MARGIN = 20
HEAD = 46
ROW = 38

STYLE = """
    .paper { fill: #ffffff; }
    text { font: 14px sans-serif; fill: #1f2933; }
    .name { font-weight: bold; text-anchor: middle; }
    .lane { stroke: #9aa5b1; stroke-width: 1.5; }
    .box { fill: #f0f4f8; stroke: #9aa5b1; }
    .note { text-anchor: middle; }
    .arrow { stroke: #2563eb; stroke-width: 2; marker-end: url(#head); }
    .empty { stroke: #9aa5b1; stroke-width: 2; stroke-dasharray: 6 4; marker-end: url(#head); }
    .missing { stroke: #dc2626; stroke-width: 2; stroke-dasharray: 2 5; }
    .label { text-anchor: middle; }
""".strip("\n")
MARKER = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker>'
)


@dataclass(frozen=True)
class Note:
    """Something that one party does."""

    lane: int
    text: str


@dataclass(frozen=True)
class Arrow:
    """Something that goes from one party to another. kind: a class of the style above."""

    source: int
    target: int
    text: str
    kind: str = "arrow"


@dataclass(frozen=True)
class Figure:
    """A drawing: its file, the parties, and what they do."""

    name: str
    lanes: tuple[str, ...]
    steps: Sequence[Note | Arrow]


def middle(lane: int) -> int:
    """Where the line of a party is."""
    return MARGIN + LANE_WIDTH * lane + LANE_WIDTH // 2


def drawn(step: Note | Arrow, height: int) -> list[str]:
    """The elements of one step."""
    if isinstance(step, Note):
        width = 7.4 * len(step.text) + 20
        left = middle(step.lane) - width / 2
        return [
            f'<rect class="box" x="{left:.0f}" y="{height - 17}" width="{width:.0f}" height="26" rx="4"/>',
            f'<text class="note" x="{middle(step.lane)}" y="{height + 1}">{escape(step.text)}</text>',
        ]
    start, end = middle(step.source), middle(step.target)
    if step.kind == "missing":
        end = (start + end) // 2
    label = (middle(step.source) + middle(step.target)) // 2
    return [
        f'<line class="{step.kind}" x1="{start}" y1="{height}" x2="{end}" y2="{height}"/>',
        f'<text class="label" x="{label}" y="{height - 7}">{escape(step.text)}</text>',
    ]


def svg(figure: Figure) -> str:
    """The drawing as a text."""
    width = 2 * MARGIN + LANE_WIDTH * len(figure.lanes)
    height = HEAD + ROW * len(figure.steps) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>\n{STYLE}\n</style>",
        f"<defs>{MARKER}</defs>",
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
    ]
    for lane, name in enumerate(figure.lanes):
        lines.append(f'<text class="name" x="{middle(lane)}" y="26">{escape(name)}</text>')
        lines.append(f'<line class="lane" x1="{middle(lane)}" y1="36" x2="{middle(lane)}" y2="{height - 12}"/>')
    for row, step in enumerate(figure.steps):
        lines += drawn(step, HEAD + ROW * row + ROW // 2)
    return "\n".join([*lines, "</svg>", ""])


WORKERS = ("worker 0", "worker 1")

FORWARD = Figure(
    "forward",
    WORKERS,
    [
        Note(0, "a and b require grad"),
        Arrow(0, 1, "message 1: mul(a, b)"),
        Arrow(1, 0, "message 2: its result, c"),
        Arrow(0, 1, "message 3: add(a, b)"),
        Arrow(1, 0, "message 4: its result, which nothing uses"),
        Note(0, "loss = c.sum()"),
    ],
)
FAST = Figure(
    "fast",
    WORKERS,
    [
        Note(0, "backward([loss])"),
        Arrow(0, 1, "gradient of message 2"),
        Arrow(0, 1, "gradient of message 4: none will ever come", "missing"),
        Note(1, "still waits for message 4"),
        Note(0, "waits for messages 1 and 3"),
    ],
)
SAFE = Figure(
    "safe",
    WORKERS,
    [
        Note(0, "the loss leads to 2, not to 4"),
        Arrow(0, 1, "gradient of 2; of 4: none"),
        Note(1, "mul's backward; add has nothing to do"),
        Arrow(1, 0, "gradients of 1; of 3: none; done"),
        Note(0, "gradients of a and b are complete"),
    ],
)
SMART = Figure(
    "smart",
    WORKERS,
    [
        Note(0, "the loss leads to 2"),
        Arrow(0, 1, "2 counts", "empty"),
        Note(1, "2 leads to 1"),
        Arrow(1, 0, "1 counts", "empty"),
        Arrow(0, 1, "followed to the end", "empty"),
        Arrow(1, 0, "followed to the end", "empty"),
        Arrow(0, 1, "gradient of 2"),
        Note(1, "mul's backward"),
        Arrow(1, 0, "gradients of 1; done"),
        Note(0, "gradients of a and b are complete"),
    ],
)
STEP = Figure(
    "step",
    ("rank 0", "shared memory", "rank 1"),
    [
        Note(0, "backward: p.grad is there"),
        Note(2, "backward: p.grad is there"),
        Note(0, "the hook counts; bucket complete"),
        Arrow(0, 1, "chunks that rank 1 owns"),
        Arrow(2, 1, "chunks that rank 0 owns"),
        Arrow(1, 0, "adds them to its own, in cache"),
        Arrow(1, 2, "adds them to its own, in cache"),
        Arrow(0, 1, "sums of its chunks"),
        Arrow(2, 1, "sums of its chunks"),
        Arrow(1, 0, "copied into p.grad"),
        Arrow(1, 2, "copied into p.grad"),
        Note(0, "step() goes on"),
        Note(2, "step() goes on"),
    ],
)
FIGURES = (FORWARD, FAST, SAFE, SMART, STEP)

if __name__ == "__main__":
    for figure in FIGURES:
        (FOLDER / f"{figure.name}.svg").write_text(svg(figure))

"""Trees as pictures, handles as tables: what a notebook shows. No library is needed.

What ran in a sandbox is hostile text: all of it is escaped here.
"""

from __future__ import annotations

import dataclasses
import html
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from . import errors
from .records import Action, CaptureStatus, TurnStatus, Verdict

# Fill and edge by verdict: what a turn cost is what one looks for first.
COLOURS = {
    Verdict.NONE: ("#eef3f7", "#8aa0b2"),
    Verdict.FILES: ("#d8ecd9", "#3f8f46"),
    Verdict.PROCESS: ("#fbe3c8", "#c77a1d"),
    Verdict.BOTH: ("#f6d3d8", "#b8384c"),
    Verdict.UNKNOWN: ("#ffffff", "#555555"),
}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 216, 40, 34, 12
# Longer text is cut: a box holds about this many characters.
_LETTERS = 32


class Drawn(Protocol):
    """What of a node is drawn."""

    @property
    def id(self) -> str: ...
    @property
    def parent_id(self) -> str: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def action(self) -> Action: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def turn_status(self) -> TurnStatus: ...
    @property
    def capture(self) -> CaptureStatus: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def value(self) -> float: ...
    @property
    def visits(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class _Box:
    id: str
    parent: str
    title: str
    notes: str
    about: str
    verdict: Verdict
    x: float
    y: float


def clean(text: str) -> str:
    """One line without what XML has no place for."""
    return re.sub(r"[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+", " ", text).strip()


def _cut(text: str, letters: int = _LETTERS) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"


class Drawing:
    """A tree as a picture; `Tree.plot` makes it. A notebook shows it as it is.

    From left to right go the turns, from above to below the branches. A box is a node:
    what ran, its verdict as colour, and below that rewards, value and visits. The
    frame is dashed where the node can't be restored.

    Attributes:
        svg: The picture as SVG.
        dot: The tree in Graphviz's language, for `dot` or one of its kin.
    """

    def __init__(self, name: str, nodes: Iterable[Drawn]) -> None:
        self.name = name
        self._boxes = _place(list(nodes))
        self._withheld = {b.id for b in self._boxes if "withheld" in b.notes}

    def __repr__(self) -> str:
        return f"<Drawing of {self.name}, {len(self._boxes)} nodes>"

    def _repr_svg_(self) -> str:
        return self.svg

    @property
    def svg(self) -> str:
        """The picture as SVG."""
        at = {box.id: box for box in self._boxes}
        wide = max((box.x for box in self._boxes), default=0) + _WIDTH + 8
        high = max((box.y for box in self._boxes), default=0) + _HEIGHT + 8
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" '
            f'viewBox="-4 -4 {wide:g} {high:g}" font-family="sans-serif" font-size="11">',
            f"<title>{html.escape(clean(self.name))}</title>",
        ]
        for box in self._boxes:
            if box.parent in at:
                before = at[box.parent]
                x1, y1 = before.x + _WIDTH, before.y + _HEIGHT / 2
                x2, y2 = box.x, box.y + _HEIGHT / 2
                middle = (x1 + x2) / 2
                lines.append(
                    f'<path d="M{x1:g} {y1:g} C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}" '
                    'fill="none" stroke="#9aa7b1"/>'
                )
        for box in self._boxes:
            fill, edge = COLOURS.get(box.verdict, COLOURS[Verdict.UNKNOWN])
            dashed = ' stroke-dasharray="4 3"' if box.id in self._withheld else ""
            lines += [
                f"<g><title>{html.escape(box.about)}</title>",
                f'<rect x="{box.x:g}" y="{box.y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
                f'fill="{fill}" stroke="{edge}"{dashed}/>',
                f'<text x="{box.x + 7:g}" y="{box.y + 16:g}">{html.escape(_cut(box.title))}</text>',
                f'<text x="{box.x + 7:g}" y="{box.y + 31:g}" fill="#5b6770" font-size="10">'
                f"{html.escape(_cut(box.notes, _LETTERS + 8))}</text></g>",
            ]
        return "\n".join([*lines, "</svg>"]) + "\n"

    @property
    def dot(self) -> str:
        """The tree in Graphviz's language."""

        def quoted(text: str) -> str:
            return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

        lines = [f"digraph {quoted(clean(self.name))} {{", "  rankdir=LR; node [shape=box, style=filled];"]
        for box in self._boxes:
            fill, edge = COLOURS.get(box.verdict, COLOURS[Verdict.UNKNOWN])
            style = ', style="filled,dashed"' if box.id in self._withheld else ""
            label = quoted(f"{_cut(box.title)}\n{box.notes}")
            lines.append(f'  {quoted(box.id)} [label={label}, fillcolor="{fill}", color="{edge}"{style}];')
        known = {box.id for box in self._boxes}
        lines += [f"  {quoted(b.parent)} -> {quoted(b.id)};" for b in self._boxes if b.parent in known]
        return "\n".join([*lines, "}"]) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file whose name ends in ``.svg`` or ``.dot``."""
        target = Path(path)
        text = {".svg": self.svg, ".dot": self.dot}.get(target.suffix)
        if text is None:
            raise errors.invalid(
                f"a drawing is saved as .svg or .dot, not as {target.suffix or target.name!r}"
            )
        target.write_text(text, encoding="utf-8")


def _place(nodes: list[Drawn]) -> list[_Box]:
    """Leaves one below the other, every other node at the middle of its children."""
    known = {node.id for node in nodes}
    below: dict[str, list[Drawn]] = {}
    for node in nodes:
        below.setdefault(node.parent_id if node.parent_id in known else "", []).append(node)
    for children in below.values():
        children.sort(key=lambda node: node.ordinal)
    order: list[Drawn] = []
    stack = list(reversed(below.get("", [])))
    while stack:  # not recursive: a tree may be thousands of turns deep
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(below.get(node.id, [])))
    top = min((node.depth for node in order), default=0)
    row: dict[str, float] = {}
    leaves = 0
    for node in order:
        if node.id not in below:
            row[node.id] = leaves * (_HEIGHT + _GAP_Y)
            leaves += 1
    for node in reversed(order):
        after = below.get(node.id)
        if after:
            row[node.id] = (row[after[0].id] + row[after[-1].id]) / 2
    return [
        _Box(
            id=node.id,
            parent=node.parent_id,
            title=clean(node.action.text) or ("root" if not node.parent_id else "…"),
            notes=clean(_notes(node)),
            about=clean(f"{node.id} {node.action.text[:2000]}"),
            verdict=node.verdict if node.parent_id else Verdict.NONE,
            x=(node.depth - top) * (_WIDTH + _GAP_X),
            y=row[node.id],
        )
        for node in order
    ]


def _notes(node: Drawn) -> str:
    parts: list[str] = []
    if node.parent_id:
        parts.append(str(node.verdict))
    if node.capture is CaptureStatus.WITHHELD:
        parts.append("withheld")
    if node.turn_status not in (TurnStatus.COMPLETED, TurnStatus.UNKNOWN):
        parts.append(str(node.turn_status))
    parts += [f"{name} {value:g}" for name, value in sorted(node.rewards.items())]
    if node.visits:
        parts.append(f"value {node.value:g} ({node.visits})")
    return ", ".join(parts)


def table(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """A small table as HTML."""
    cells = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(name)}</th>"
        f"<td style='text-align:left'><pre style='margin:0'>{html.escape(str(value))}</pre></td></tr>"
        for name, value in rows
        if value not in ("", None)
    )
    return f"<table><caption>{html.escape(caption)}</caption>{cells}</table>"

"""The final view of the demo as an SVG file: the river on the left, the audit on the right.

Drawn with rectangles, because characters leave gaps in some fonts. It fits a screen.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final

from anabranch._demo.audit import FIGURES, MUST_BE_ZERO, Audit, audit_lines
from anabranch._demo.stage import RiverRow, ShardView
from anabranch.limits import HASH_KEY_MAX

WIDTH: Final = 1000
LEFT, TOP, RIVER_WIDTH, RIVER_HEIGHT = 60, 76, 330, 410
TABLE: Final = 505
NAMES: Final = 125
LINE: Final = 26
COLOURS: Final = {"one": "#4aa3b5", "two": "#a277b8", "three": "#d3b24b", None: "#4b5159"}
INK, FAINT, GOOD, BAD = "#e6e6e6", "#9aa0a6", "#8fbf6a", "#e06c75"


def draw(rows: Sequence[RiverRow], audit: Audit) -> str:
    table = audit_lines(audit)
    height = max(TOP + RIVER_HEIGHT + 56, TOP + LINE * (len(table) + 2))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#23272e"/>',
        _text(24, 34, "anabranch demo", INK, size=19, weight="bold"),
        _text(24, 58, "hash space across, time downwards, one colour for each worker", FAINT),
        *_river(rows),
        *_legend(TOP + RIVER_HEIGHT + 30),
        *_table(table),
        _text(TABLE, height - 24, f"seed {audit.seed}", FAINT),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _river(rows: Sequence[RiverRow]) -> Iterator[str]:
    if not rows:
        return
    end = rows[-1].seconds or 1.0
    scale = RIVER_HEIGHT / end
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.shards)]  # same owners: one rectangle
    bottoms = [TOP + scale * group[0].seconds for group in groups[1:]]
    for group, bottom in zip(groups, [*bottoms, TOP + RIVER_HEIGHT], strict=True):
        # A closed shard that is still being read hides its children, which must wait for it.
        for shard in sorted(group[0].shards, key=lambda shard: not shard.is_open):
            yield _rectangle(shard, TOP + scale * group[0].seconds, bottom)
    beside = TOP - 14.0
    for row in rows:
        y = TOP + scale * row.seconds
        if row.marks:
            yield f'<path d="M{LEFT} {y:.1f}H{LEFT + RIVER_WIDTH + 6}" stroke="{INK}" stroke-opacity=".35"/>'
        for mark in row.marks:
            beside = max(y, beside + 15)  # two marks do not cover each other
            yield _text(LEFT + RIVER_WIDTH + 10, beside + 5, mark, INK)
    for part in range(5):
        y = TOP + RIVER_HEIGHT * part / 4
        yield _text(LEFT - 10, y + 5, f"{end * part / 4:.0f} s", FAINT, anchor="end")


def _rectangle(shard: ShardView, top: float, bottom: float) -> str:
    first = LEFT + RIVER_WIDTH * shard.start / (HASH_KEY_MAX + 1)
    last = LEFT + RIVER_WIDTH * (shard.end + 1) / (HASH_KEY_MAX + 1)
    # Rows overlap slightly, and there is a small gap between shards.
    size = f'width="{last - first - 3:.1f}" height="{bottom - top + 0.6:.1f}"'
    return f'<rect x="{first:.1f}" y="{top:.1f}" {size} fill="{COLOURS.get(shard.owner, COLOURS[None])}"/>'


def _legend(y: int) -> Iterator[str]:
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 122 * number
        yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="2" fill="{colour}"/>'
        yield _text(x + 20, y + 1, f"worker {name}" if name else "nobody", INK)


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    columns = len(lines[0]) - 1
    step = (WIDTH - 24 - TABLE - NAMES) / columns
    for number, (name, *cells) in enumerate(lines):
        y = TOP + 14 + LINE * number
        yield _text(TABLE, y, name, FAINT if number else INK)
        for column, cell in enumerate(cells):
            x = TABLE + NAMES + step * (column + 1)
            is_judged = name in MUST_BE_ZERO
            colour = INK if not is_judged else GOOD if cell == "0" else BAD
            weight = "bold" if is_judged else "normal"
            yield _text(x, y, cell, colour, anchor="end", weight=weight, size=14 if number else 11)
        if number in {0, len(FIGURES)}:
            yield f'<path d="M{TABLE} {y + 9}H{WIDTH - 24}" stroke="{FAINT}" stroke-opacity=".5"/>'


def _text(
    x: float, y: float, text: str, colour: str, *, anchor: str = "start", size: int = 14, weight: str = "normal"
) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

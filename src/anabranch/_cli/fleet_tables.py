"""A fleet as lines of text: what `apps show` prints and `top` redraws.

Each line fits the width, and lines beyond the height are counted. Stalled shards come first, each with its reason below
it. Without a width or height nothing is cut.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from anabranch._cli.options import ago, lag, rate
from anabranch._cli.output import counted, styled

if TYPE_CHECKING:
    from rich.text import Text

    from anabranch.reports import FleetMember, FleetShard, FleetStatus

_PALETTE: Final = ("cyan", "magenta", "yellow", "blue", "green", "bright_cyan", "bright_magenta", "bright_yellow")
_MEMBER_STYLES: Final = {"live": "green", "silent": "red", "dead": "red", "sealed": "dim", "left": "dim"}
_SHARD_STYLES: Final = {
    "stopped": "bold red",
    "orphaned": "red",
    "unowned": "red",
    "stalled": "yellow",
    "paused": "yellow",
    "waiting": "yellow",
    "moving": "green",
}
"""Most urgent first."""
_NAME_COLUMNS_MAX: Final = 30
_MEMBERS_SHOWN_MAX: Final = 8
"""The maximum when lines are scarce: at most a third of them."""

Cells = tuple[tuple[str, str], ...]
"""Text and style of each part."""


def headline(status: "FleetStatus") -> str:
    """`3 workers live, 4 shards: 3 moving, 1 stalled; 1.2 s behind, 250 records/s`."""
    shards, stalled = status.unfinished_shards, status.stalled_shards
    moving = len(shards) - len(stalled)
    parts = [f"{counted(len(status.live_members), 'worker')} live", counted(len(shards), "shard")]
    if shards:
        parts[1] += f": {moving} moving"
    if stalled:
        parts.append(f"{len(stalled)} stalled")
    behind = "" if status.millis_behind_latest is None else f"; {lag(status.millis_behind_latest)} behind"
    return f"{', '.join(parts)}{behind}, {rate(status.records_per_second)} records/s"


def fleet_lines(status: "FleetStatus", *, height: int | None = None) -> list["Text"]:
    """Members, then shards. With a height, no more lines than that."""
    styles = _owner_styles(status)
    members = sorted(
        (member for member in status.members if member.state != "left"),
        key=lambda member: (not member.is_live, member.worker_id, member.member_id),
    )
    left_count = len(status.members) - len(members)
    shown = members if height is None else members[: max(1, min(_MEMBERS_SHOWN_MAX, height // 3))]
    lines = _aligned(
        ("WORKER", "STATE", "BEAT", "SHARDS", "RECORDS/S"),
        [_member_cells(member, styles[member.member_id]) for member in shown],
        right=(2, 3, 4),
    )
    rest = [f"{counted(len(members) - len(shown), 'worker')} more"] if len(shown) < len(members) else []
    rest += [f"{counted(left_count, 'worker')} that stopped gracefully"] if left_count else []
    if rest:
        lines.append(styled(f"and {', '.join(rest)}", "dim"))
    lines.append(styled(""))
    left = None if height is None else max(3, height - len(lines))
    return lines + _shard_lines(status, styles, left)


def _shard_lines(status: "FleetStatus", styles: dict[str, str], height: int | None) -> list["Text"]:
    shards = _in_order_of_need(status)
    finished_count = len(status.shards) - len(shards)
    with_stream = len(status.streams) > 1
    rows = _aligned(
        ("SHARD", "STATE", "WORKER", "BEHIND", "RECORDS/S", "COMMITTED"),
        [_shard_cells(shard, styles, with_stream=with_stream) for shard in shards],
        right=(3, 4, 5),
    )
    lines, shown = rows[:1], 0
    for shard, row in zip(shards, rows[1:], strict=True):
        added = [row] if shard.reason is None else [row, styled(f"    {' '.join(shard.reason.split())}", "dim")]
        if height is not None and len(lines) + len(added) > height - 1:
            break
        lines += added
        shown += 1
    rest = [f"{counted(len(shards) - shown, 'shard')} more"] if shown < len(shards) else []
    rest += [f"{counted(finished_count, 'shard')} read to the end"] if finished_count else []
    if rest:
        lines.append(styled(f"and {', '.join(rest)}", "dim"))
    return lines


def _in_order_of_need(status: "FleetStatus") -> list["FleetShard"]:
    need = list(_SHARD_STYLES)
    return sorted(
        status.unfinished_shards,
        key=lambda shard: (need.index(shard.state), -(shard.millis_behind_latest or 0), shard.stream, shard.shard_id),
    )


def _owner_styles(status: "FleetStatus") -> dict[str, str]:
    """A stable colour for each member."""
    names = sorted(member.member_id for member in status.members)
    return {member_id: _PALETTE[index % len(_PALETTE)] for index, member_id in enumerate(names)}


def _member_cells(member: "FleetMember", style: str) -> Cells:
    state = "stopping" if member.is_live and member.draining else member.state
    return (
        (member.worker_id, style if member.is_live else "dim"),
        (state, _MEMBER_STYLES[member.state]),
        (ago(member.heartbeat_age) if member.heartbeat_seen and member.state in {"live", "silent"} else "-", ""),
        (str(member.shard_count), ""),
        (rate(member.records_per_second) if member.is_live and member.records_per_second is not None else "-", ""),
    )


def _shard_cells(shard: "FleetShard", styles: dict[str, str], *, with_stream: bool) -> Cells:
    written = shard.checkpointed_seconds
    return (
        (f"{shard.stream} {shard.shard_id}" if with_stream else shard.shard_id, ""),
        (shard.state, _SHARD_STYLES[shard.state]),
        (shard.worker_id or "-", styles.get(shard.owner or "", "")),
        (lag(shard.millis_behind_latest), ""),
        ("-" if shard.records_per_second is None else rate(shard.records_per_second), ""),
        ("never" if written is None else f"{ago(max(0.0, time.time() - written))} ago", ""),
    )


def _aligned(headings: Sequence[str], rows: Sequence[Cells], *, right: Sequence[int]) -> list["Text"]:
    table: list[Cells] = [tuple((heading, "bold") for heading in headings), *rows]
    widths = [min(_NAME_COLUMNS_MAX, max(len(cells[column][0]) for cells in table)) for column in range(len(headings))]
    lines: list[Text] = []
    for cells in table:
        line = styled("")
        for column, (text, style) in enumerate(cells):
            width = widths[column]
            cut = text if len(text) <= width else f"{text[: width - 1]}…"
            last = column == len(cells) - 1
            cell = cut.rjust(width) if column in right else cut if last else cut.ljust(width)
            line.append(cell, style)
            if not last:
                line.append("  ")
        lines.append(line)
    return lines

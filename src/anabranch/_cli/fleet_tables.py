"""A fleet as lines of text: what `apps show` prints and `top` redraws.

Lines fit the width of a terminal; piped output is not cut. Stalled shards come first, each with its reason below it.
"""

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anabranch._cli.options import ago, rate
from anabranch._cli.output import counted, one_line, styled, table_lines, wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from anabranch.reports import FleetMember, FleetShard, FleetStatus

RETENTION_SHORT_SECONDS: Final = 6 * 3_600
"""If unread records are trimmed sooner than this, the headline and `explain` warn."""
_PALETTE: Final = ("cyan", "magenta", "yellow", "blue", "green", "bright_cyan", "bright_magenta", "bright_yellow")
_MEMBER_STYLES: Final = {"live": "green", "silent": "red", "dead": "red", "evicted": "dim", "left": "dim"}
_SHARD_STYLES: Final = {
    "stopped": "bold red",
    "orphaned": "red",
    "unowned": "red",
    "stalled": "yellow",
    "paused": "yellow",
    "waiting": "yellow",
    "reading": "green",
}
"""Most urgent first."""


def status_document(status: "FleetStatus") -> dict[str, Any]:
    """For `--json`: the status, and the figures of the whole fleet."""
    totals = ("lag", "retention_left", "millis_behind_latest", "records_per_second")
    return msgspec.structs.asdict(status) | {name: getattr(status, name) for name in totals}


def headline(status: "FleetStatus") -> str:
    """`3 workers live, 4 shards: 3 reading, 1 stalled; 1.2 s behind, 250 records/s`."""
    shards, stalled = status.unfinished_shards, status.stalled_shards
    reading = len(shards) - len(stalled)
    parts = [f"{counted(len(status.live_members), 'worker')} live", counted(len(shards), "shard")]
    if shards:
        parts[1] += f": {reading} reading"
    if stalled:
        parts.append(f"{len(stalled)} stalled")
    behind = "" if status.lag is None else f"; {ago(status.lag)} behind"
    left = status.retention_left
    if left is not None and left < RETENTION_SHORT_SECONDS:
        behind += f", {ago(left)} before unread records are trimmed"
    return f"{', '.join(parts)}{behind}, {rate(status.records_per_second)} records/s"


def fleet_lines(status: "FleetStatus", console: "Console") -> list["Text"]:
    return [line for section in fleet_sections(status, console) for line in section]


def fleet_sections(status: "FleetStatus", console: "Console") -> list[list["Text"]]:
    """Members, then shards. Each begins with its headings."""
    styles = _owner_styles(status)
    members = sorted(
        (member for member in status.members if member.state != "left"),
        key=lambda member: (not member.is_live, member.worker_id, member.member_id),
    )
    lines = table_lines(
        ("WORKER", "STATE", "HEARTBEAT", "SHARDS", "RECORDS/S"),
        [_member_cells(member, styles[member.member_id]) for member in members],
        console,
        right=("HEARTBEAT", "SHARDS", "RECORDS/S"),
    )
    if left_count := len(status.members) - len(members):
        lines.append(styled(f"and {counted(left_count, 'worker')} that stopped gracefully", "dim"))
    return [[*lines, styled("")], _shard_lines(status, styles, console)]


def _shard_lines(status: "FleetStatus", styles: dict[str, str], console: "Console") -> list["Text"]:
    shards = _most_urgent_first(status)
    with_stream = len(status.streams) > 1
    pushed = any(shard.subscription is not None for shard in shards)
    heading, *rows = table_lines(
        ("SHARD", "STATE", "WORKER", "BEHIND", "RECORDS/S", "COMMITTED", *(("PUSHED", "EVENT") if pushed else ())),
        [
            [*_shard_cells(shard, styles, with_stream=with_stream), *(_pushed_cells(shard) if pushed else ())]
            for shard in shards
        ],
        console,
        right=("BEHIND", "RECORDS/S", "COMMITTED", "EVENT"),
    )
    lines = [heading]
    for shard, row in zip(shards, rows, strict=True):
        lines.append(row)
        if shard.reason is not None:
            lines += [styled(line, "dim") for line in wrapped(one_line(shard.reason.text), console, indent="    ")]
    if finished_count := len(status.shards) - len(shards):
        lines.append(styled(f"and {counted(finished_count, 'shard')} read to the end", "dim"))
    return lines


def _most_urgent_first(status: "FleetStatus") -> list["FleetShard"]:
    urgency = list(_SHARD_STYLES)
    return sorted(
        status.unfinished_shards,
        key=lambda shard: (
            urgency.index(shard.state),
            shard.subscription is None or shard.subscription.state == "active",
            -(shard.lag or 0),
            shard.stream,
            shard.shard_id,
        ),
    )


def _owner_styles(status: "FleetStatus") -> dict[str, str]:
    """A stable colour for each member."""
    names = sorted(member.member_id for member in status.members)
    return {member_id: _PALETTE[index % len(_PALETTE)] for index, member_id in enumerate(names)}


def _member_cells(member: "FleetMember", style: str) -> list["Text"]:
    state = "stopping" if member.is_live and member.draining else member.state
    has_beat = member.heartbeat_seen and member.state in {"live", "silent"}
    return [
        styled(member.worker_id, style if member.is_live else "dim"),
        styled(state, _MEMBER_STYLES[member.state]),
        styled(ago(member.heartbeat_age if has_beat else None)),
        styled(str(member.shard_count)),
        styled(rate(member.records_per_second if member.is_live else None)),
    ]


def _shard_cells(shard: "FleetShard", styles: dict[str, str], *, with_stream: bool) -> list["Text"]:
    written = shard.checkpointed_seconds
    return [
        styled(f"{shard.stream} {shard.shard_id}" if with_stream else shard.shard_id),
        styled(shard.state, _SHARD_STYLES[shard.state]),
        styled(shard.worker_id or "-", styles.get(shard.owner or "", "")),
        styled(ago(shard.lag)),
        styled(rate(shard.records_per_second)),
        styled("never" if written is None else f"{ago(max(0.0, time.time() - written))} ago"),
    ]


def _pushed_cells(shard: "FleetShard") -> list["Text"]:
    """How long it has been subscribed, or its state if it is not; the number of renewals; the age of the last event."""
    found = shard.subscription
    if found is None:
        return [styled("-"), styled("-")]
    since = found.state if found.seconds is None else ago(found.seconds)
    style = "green" if found.state == "active" else "yellow"
    return [styled(f"{since} r{found.renewal_count}", style), styled(ago(found.event_seconds_ago))]

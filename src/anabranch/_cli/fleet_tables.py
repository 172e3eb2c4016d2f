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
"""The headline and `explain` warn if an unread record will be trimmed sooner than this."""
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
"""In this order `apps show` and `top` list the shards: the most urgent first."""


def status_document(status: "FleetStatus") -> dict[str, Any]:
    """For `--json`: the fields of the status, and its properties for the whole fleet."""
    fleet_wide = ("lag", "retention_left", "millis_behind_latest", "records_per_second")
    return msgspec.structs.asdict(status) | {name: getattr(status, name) for name in fleet_wide}


def headline(status: "FleetStatus") -> str:
    """For example `3 workers live, 4 shards: 3 reading, 1 stalled; 1.2 s behind, 250 records/s`."""
    shards, stalled = status.unfinished_shards, status.stalled_shards
    line = f"{counted(len(status.live_members), 'worker')} live, {counted(len(shards), 'shard')}"
    if shards:
        line += f": {len(shards) - len(stalled)} reading"
    if stalled:
        line += f", {len(stalled)} stalled"
    if status.lag is not None:
        line += f"; {ago(status.lag)} behind"
    left = status.retention_left
    if left is not None and left < RETENTION_SHORT_SECONDS:
        line += f", {ago(left)} before unread records are trimmed"
    return f"{line}, {rate(status.records_per_second)} records/s"


def fleet_lines(status: "FleetStatus", console: "Console") -> list["Text"]:
    return [line for section in fleet_sections(status, console) for line in section]


def fleet_sections(status: "FleetStatus", console: "Console") -> list[list["Text"]]:
    """Two tables with headings: the members, then the shards."""
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
    has_fan_out = any(shard.subscription is not None for shard in shards)
    fan_out_headings = ("SUBSCRIPTION", "EVENT") if has_fan_out else ()
    heading, *rows = table_lines(
        ("SHARD", "STATE", "WORKER", "BEHIND", "RECORDS/S", "COMMITTED", *fan_out_headings),
        [
            [*_shard_cells(shard, styles, with_stream=with_stream), *(_fan_out_cells(shard) if has_fan_out else ())]
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
            shard.subscription is None or shard.subscription.state == "active",  # those not subscribed come first
            -(shard.lag or 0),
            shard.stream,
            shard.shard_id,
        ),
    )


def _owner_styles(status: "FleetStatus") -> dict[str, str]:
    """A colour for each member id. It stays the same while the members do."""
    member_ids = sorted(member.member_id for member in status.members)
    return {member_id: _PALETTE[index % len(_PALETTE)] for index, member_id in enumerate(member_ids)}


def _member_cells(member: "FleetMember", style: str) -> list["Text"]:
    state = "stopping" if member.is_live and member.draining else member.state
    has_age = member.heartbeat_seen and member.state in {"live", "silent"}
    return [
        styled(member.worker_id, style if member.is_live else "dim"),
        styled(state, _MEMBER_STYLES[member.state]),
        styled(ago(member.heartbeat_age if has_age else None)),
        styled(str(member.shard_count)),
        styled(rate(member.records_per_second if member.is_live else None)),
    ]


def _shard_cells(shard: "FleetShard", styles: dict[str, str], *, with_stream: bool) -> list["Text"]:
    committed = shard.checkpointed_seconds
    return [
        styled(f"{shard.stream} {shard.shard_id}" if with_stream else shard.shard_id),
        styled(shard.state, _SHARD_STYLES[shard.state]),
        styled(shard.worker_id or "-", styles.get(shard.owner or "", "")),
        styled(ago(shard.lag)),
        styled(rate(shard.records_per_second)),
        styled("never" if committed is None else f"{ago(max(0.0, time.time() - committed))} ago"),
    ]


def _fan_out_cells(shard: "FleetShard") -> list["Text"]:
    """`2.1 min r3` is a subscription of this age after 3 renewals; `polled r3` is one that is not active, in its state.
    The second cell is the age of the last event.
    """
    subscription = shard.subscription
    if subscription is None:
        return [styled("-"), styled("-")]
    state = subscription.state if subscription.seconds is None else ago(subscription.seconds)
    style = "green" if subscription.state == "active" else "yellow"
    return [styled(f"{state} r{subscription.renewal_count}", style), styled(ago(subscription.event_seconds_ago))]

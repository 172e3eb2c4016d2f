"""`anabranch explain APP [SHARD]`: says who holds a shard, where it is, why it is stalled and what to do about it.

The text is made from the application's status. Why a shard is stalled, and what to do, are the text and the advice of
its reason (`anabranch.reasons`).
"""

import argparse
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from anabranch._cli.connection import ask_application, connect
from anabranch._cli.fleet_tables import RETENTION_SHORT_SECONDS
from anabranch._cli.options import (
    add_application_argument,
    add_aws_options,
    add_json_option,
    ago,
    rate,
    shard_id_argument,
    timestamp,
)
from anabranch._cli.output import (
    CommandFailed,
    clean,
    counted,
    make_console,
    one_line,
    print_json,
    show_lines,
    wrapped,
)
from anabranch._model.streams import Shard, parse_stream
from anabranch.errors import AnabranchError
from anabranch.reasons import LetterNotWritten, Reason, WaitsForParents
from anabranch.reports import FleetShard, FleetStatus

if TYPE_CHECKING:
    from rich.console import Console


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One shard, as `explain --json` prints it."""

    stream: str
    shard_id: str
    state: str
    reason: Reason | None
    """Why it is stalled; None if it is not."""
    situation: tuple[str, ...]
    """Who holds it, where it is, why it is stalled."""
    advice: str | None = None
    """What to do; None for a shard that is being read or is finished."""
    commands: dict[str, str] = {}
    """Commands that retry or skip the record at which the shard is stopped, each with its purpose."""


def explain_fleet(status: FleetStatus) -> list[str]:
    live = status.live_members
    shards = status.unfinished_shards
    lines = [f"Application {status.app} reads {' and '.join(status.streams) or 'no stream yet'}."]
    if live:
        names = ", ".join(member.worker_id for member in live)
        lines.append(f"{counted(len(live), 'live worker')}: {names}.")
    else:
        lines.append("No worker is running: nothing is read until you start one.")
    if status.lag is not None:
        lines.append(f"It is {ago(status.lag)} behind." if status.lag else "It is at the tip.")
    lines += [_sentence(member.silence) for member in status.members if member.silence is not None]
    stalled = status.stalled_shards
    if stalled:
        lines.append(f"{len(stalled)} of {counted(len(shards), 'shard')} {_agree(len(stalled), 'is', 'are')} stalled.")
    elif shards:
        lines.append(f"{counted(len(shards), 'shard')}, none stalled.")
    return lines


def explain_shard(shard: FleetShard, status: FleetStatus, leases: str | None = None) -> Explanation:
    """`leases` is how the user named the lease store, for the commands in the advice."""
    reason, advice = shard.reason, None if shard.reason is None else shard.reason.advice
    situation = [f"{shard.shard_id} of {shard.stream} {_STATE_PHRASES[shard.state]}."]
    if shard.state != "finished":
        situation += [_holder(shard, status), _position(shard), _retention(shard), _subscription(shard, status)]
    if shard.state == "finished":
        follows = f"Its records continue in {' and '.join(shard.children)}."
        situation.append(follows if shard.children else "It has no children: nothing follows it.")
    elif shard.state == "stopped" and shard.stopped is not None:
        situation.append(f"At {timestamp(shard.stopped.stopped_seconds)} it {one_line(reason)}.")
        situation.append("Its checkpoint stays before that record: nothing is skipped.")
    elif shard.state == "waiting":
        parents = [one for one in status.shards if one.stream == shard.stream and one.shard_id in shard.waits_for]
        situation.append(_parents(parents))
        advice = _advice_for_child(advice, parents)
    elif reason is not None:
        situation.append(_sentence(reason))
    elif shard.takes_without_progress > 1:
        situation.append(f"{shard.takes_without_progress} holders in a row have made no progress on it.")
    return Explanation(
        stream=shard.stream,
        shard_id=shard.shard_id,
        state=shard.state,
        reason=reason,
        situation=tuple(filter(None, situation)),
        advice=advice,
        commands=_ways_past(shard, status, leases),
    )


def _ways_past(shard: FleetShard, status: FleetStatus, leases: str | None) -> dict[str, str]:
    """The commands that retry or skip the record at which the shard is stopped, each with its purpose."""
    from anabranch.stores.urls import shown_url

    options = []
    if sum(other.shard_id == shard.shard_id for other in status.unfinished_shards) > 1:
        options += ["--stream", shard.stream]
    if leases is not None:
        options += ["--leases", shown_url(leases)]  # without a password that may be in it

    def command(action: str, *arguments: str) -> str:
        return shlex.join(["anabranch", "apps", action, status.app, shard.shard_id, *arguments, *options])

    ways: dict[str, str] = {}
    position = shard.reason.position if isinstance(shard.reason, LetterNotWritten) else None
    if shard.state == "stopped" and shard.stopped is not None:
        position = shard.stopped.position
        ways["to try its record again"] = command("resume")
    if position is not None:
        ways["to go on without that record"] = command("skip", position)
    return ways


_STATE_PHRASES: Final = {
    "reading": "is being read",
    "stalled": "is stalled",
    "stopped": "has stopped",
    "paused": "is paused",
    "waiting": "waits for its parents",
    "orphaned": "is held by a worker without heartbeats",
    "unowned": "is held by no worker",
    "finished": "was read to its end",
}


def _sentence(reason: Reason | None) -> str:
    text = one_line(reason)
    return f"{text[:1].upper()}{text[1:]}."


def _holder(shard: FleetShard, status: FleetStatus) -> str:
    if shard.owner is None:
        return "" if shard.state in {"unowned", "waiting"} else "No worker holds it."
    owner = next((member for member in status.members if member.member_id == shard.owner), None)
    if owner is None:
        return f"Its last holder, {shard.owner}, is no longer known."
    if owner.state in {"left", "evicted"}:
        how = "has stopped gracefully" if owner.state == "left" else "was declared dead by the others"
        return f"Its last holder, {owner.worker_id}, {how}."
    is_beating = owner.is_live and owner.heartbeat_seen
    beat = f", whose last heartbeat was {ago(owner.heartbeat_age)} ago" if is_beating else ""
    return f"It is held by {owner.worker_id}{beat}."


def _position(shard: FleetShard) -> str:
    if shard.checkpoint is None:
        where = f"It has no checkpoint yet: it starts at {shard.starts_at}"
    else:
        where = f"Everything up to {shard.checkpoint} is handled"
        if shard.checkpointed_seconds is not None:
            where += f", committed {ago(max(0.0, time.time() - shard.checkpointed_seconds))} ago"
    if shard.lag is None:
        return f"{where}."
    behind = "it is at the tip" if not shard.lag else f"it is {ago(shard.lag)} behind"
    if shard.records_per_second is not None:
        behind += f", at {rate(shard.records_per_second)} records per second"
    return f"{where}; {behind}."


def _retention(shard: FleetShard) -> str:
    """When its oldest unfinished record is trimmed, if that is soon."""
    left = shard.retention_left
    if left is None or left >= RETENTION_SHORT_SECONDS:
        return ""
    return f"Its oldest unfinished record is trimmed in {ago(left)}: after that it is lost."


def _subscription(shard: FleetShard, status: FleetStatus) -> str:
    found = shard.subscription
    if found is None:
        others = [one for one in status.shards if one.owner == shard.owner and one.subscription is not None]
        if shard.owner is None or not others:
            return ""
        return "It is read with fan-out; its subscription is not reported: a worker reports on its 20 worst shards."
    event = "" if found.event_seconds_ago is None else f"; the last event came {ago(found.event_seconds_ago)} ago"
    renewed = f"renewed {counted(found.renewal_count, 'time')}"
    if found.seconds is not None:
        return f"It is read with fan-out: subscribed for {ago(found.seconds)}, {renewed}{event}."
    why = "" if found.reason_code is None else f" ({found.reason_code})"
    how = "it is polled for now" if found.state in {"polled", "probing"} else f"its subscription is {found.state}"
    return f"It is read with fan-out, but {how}{why}; {renewed}{event}."


def explain_unleased(shard: Shard, listed: Mapping[str, Shard], stream: str, status: FleetStatus) -> Explanation | None:
    """Explains a listed shard without a lease by its unfinished ancestors; None if there are none."""
    unfinished = {other.shard_id: other for other in status.unfinished_shards if other.stream == stream}
    found: dict[str, FleetShard] = {}
    waiting = list(shard.parent_shard_ids)
    while waiting:
        parent_id = waiting.pop()
        if parent_id in unfinished:
            found[parent_id] = unfinished[parent_id]
        elif parent_id in listed:
            waiting += listed[parent_id].parent_shard_ids
    if not found:
        return None
    parents = [found[parent_id] for parent_id in sorted(found)]
    reason = WaitsForParents(parents=tuple(sorted(found)))
    ended = f"{' and '.join(reason.parents)} {_agree(len(found), 'has', 'have')} been read to the end"
    return Explanation(
        stream=stream,
        shard_id=shard.shard_id,
        state="waiting",
        reason=reason,
        situation=(
            f"{shard.shard_id} of {stream} {_STATE_PHRASES['waiting']}.",
            f"It has no lease yet; one is created when {ended}.",
            _parents(parents),
        ),
        advice=_advice_for_child(reason.advice, parents),
    )


def _parents(parents: list[FleetShard]) -> str:
    said = [
        f"{parent.shard_id} {_STATE_PHRASES[parent.state]}"
        + ("" if parent.lag is None else f" ({ago(parent.lag)} behind)")
        for parent in parents
    ]
    return f"To keep the order per key it waits for its parents: {', '.join(said)}."


def _advice_for_child(advice: str | None, parents: list[FleetShard]) -> str | None:
    stalled = [parent.shard_id for parent in parents if parent.state != "reading"]
    if not stalled:
        return advice
    return f"{advice}; see why {' and '.join(stalled)} {_agree(len(stalled), 'is', 'are')} stalled"


def _agree(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


_EXAMPLES: Final = """\
examples:
  anabranch explain billing
  anabranch explain billing 3
  anabranch explain billing shardId-000000000003 --json

Without SHARD: the application, and every shard that is stalled. It watches
for a few seconds to see the workers' heartbeats.
"""
_INDENT: Final = "  "
_COMMAND_MARGIN: Final = 12  # the indent, a space and a backslash


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    add_application_argument(parser)
    parser.add_argument(
        "shard", nargs="?", type=shard_id_argument, metavar="SHARD", help="id of a shard, or its number alone"
    )
    add_json_option(parser)
    add_aws_options(parser)


def _run(arguments: argparse.Namespace) -> None:
    status = ask_application(arguments, lambda application: application.status(watch=True))
    shards = status.stalled_shards
    if arguments.shard is not None:
        shards = tuple(shard for shard in status.shards if shard.shard_id == arguments.shard)
    explanations = [explain_shard(shard, status, arguments.leases) for shard in shards]
    if arguments.shard is not None and not explanations:
        explanations = _explain_unleased(arguments, status)
    if arguments.json:
        print_json(explanations)
        return
    console = make_console()
    blocks = [_lines(explanation, console) for explanation in explanations]
    if arguments.shard is None:
        blocks.insert(0, [line for sentence in explain_fleet(status) for line in wrapped(sentence, console)])
    for number, block in enumerate(blocks):
        show_lines(["", *block] if number else block)


def _explain_unleased(arguments: argparse.Namespace, status: FleetStatus) -> list[Explanation]:
    """A shard gets its lease when its parents have been read to the end; until then only the stream lists it."""
    missing = f"application {status.app!r} has no lease for {arguments.shard}"
    reads = f"It reads: {', '.join(shard.shard_id for shard in status.unfinished_shards) or 'none'}"
    found: list[Explanation | None] = []
    for stream in status.streams:
        try:
            with connect(arguments) as connection:
                shards = connection.run(connection.shards(parse_stream(stream)))
        except AnabranchError as error:
            raise CommandFailed(
                f"{missing}. {reads}; if it is a child of one of these, its lease is created when that one has been "
                f"read to the end. Stream {stream} could not be listed to find out: {error}"
            ) from error
        listed = {shard.shard_id: shard for shard in shards}
        if (shard := listed.get(arguments.shard)) is not None:
            found.append(explain_unleased(shard, listed, stream, status))
    if not found:
        raise CommandFailed(f"{missing}, and no stream of it has that shard. {reads}")
    explanations = [one for one in found if one is not None]
    if not explanations:
        raise CommandFailed(
            f"{missing}: workers find new shards when they list the stream, every 30 s by default; a shard that was "
            f"closed before the application started is not read. {reads}"
        )
    return explanations


def _lines(explanation: Explanation, console: "Console") -> list[str]:
    first, *others = explanation.situation
    lines = wrapped(first, console)
    for sentence in others:
        lines += wrapped(sentence, console, indent=_INDENT)
    if explanation.advice is not None:
        lines += wrapped(f"-> {explanation.advice}", console, indent=_INDENT, hanging="   ")
    for purpose, command in explanation.commands.items():
        lines.append(f"{_INDENT}   {purpose}:")
        lines += [f"{_INDENT}     {clean(line)}" for line in _copyable(command, console)]
    return lines


def _copyable(command: str, console: "Console") -> list[str]:
    """The command, quoted for a shell: on a terminal in lines that fit, elsewhere in one line."""
    lines = [""]
    for word in shlex.split(command):
        quoted = shlex.quote(word)
        if lines[-1] and console.is_terminal and len(lines[-1]) + len(quoted) > console.width - _COMMAND_MARGIN:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {quoted}" if lines[-1] else quoted
    return lines

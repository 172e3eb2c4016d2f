"""`anabranch explain APP [SHARD]`: says who holds a shard, where it is, why it is stalled and what to do about it.

The text is made from the application's status. Each state of a shard has its own paragraph, which ends with advice or
says that there is nothing to do.
"""

import argparse
import asyncio
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from anabranch._cli.connection import connect
from anabranch._cli.options import (
    add_application_argument,
    add_aws_options,
    add_json_option,
    ago,
    lag,
    rate,
    shard_id_argument,
    timestamp,
)
from anabranch._cli.output import DONE, CommandFailed, counted, make_console, print_json
from anabranch._model.streams import Shard, parse_stream
from anabranch.errors import AnabranchError
from anabranch.reports import FleetMember, FleetShard, FleetStatus

if TYPE_CHECKING:
    from anabranch.reports import FleetStatus


_RETRIED: Final = "each worker that is started after the stop tries that record once more"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One shard, as `explain --json` prints it."""

    stream: str
    shard_id: str
    state: str
    situation: tuple[str, ...]
    """Who holds it, where it is, why it is stalled."""
    remedy: str | None
    """What to do; None for a shard that is moving or finished."""


def explain_fleet(status: FleetStatus) -> list[str]:
    """The application as a whole."""
    live = status.live_members
    shards = status.unfinished_shards
    lines = [f"Application {status.app} reads {' and '.join(status.streams) or 'no stream yet'}."]
    if live:
        names = ", ".join(member.worker_id for member in live)
        lines.append(f"{counted(len(live), 'live worker')}: {names}.")
    else:
        lines.append("No worker is running: nothing is read until you start one.")
    lines += [_unwell(member) for member in status.members if member.state in {"silent", "dead"}]
    stalled = status.stalled_shards
    if stalled:
        lines.append(f"{len(stalled)} of {counted(len(shards), 'shard')} {_agree(len(stalled), 'is', 'are')} stalled.")
    elif shards:
        lines.append(f"{counted(len(shards), 'shard')}, none stalled.")
    return lines


def _unwell(member: FleetMember) -> str:
    if member.state == "dead":
        return f"The process of {member.worker_id} is gone; it did not shut down cleanly."
    return (
        f"{member.worker_id} has sent no heartbeat for {member.heartbeat_age:.0f} s: it is paused, overloaded, or "
        "cut off from the lease store."
    )


def explain_shard(shard: FleetShard, status: FleetStatus) -> Explanation:
    owner = next((member for member in status.members if member.member_id == shard.owner), None)
    situation = [f"{shard.shard_id} of {shard.stream} {_STATE_PHRASES[shard.state]}."]
    if shard.state == "finished":
        situation.append(_children(shard))
        return _explanation(shard, situation, None)
    why, remedy = _why(shard, owner, status)
    situation += [_holder(shard, owner), _position(shard), *why]
    return _explanation(shard, [sentence for sentence in situation if sentence], remedy)


_STATE_PHRASES: Final = {
    "moving": "is moving",
    "stalled": "is stalled",
    "stopped": "has stopped",
    "paused": "is paused",
    "waiting": "waits for its parents",
    "orphaned": "is held by a worker without heartbeats",
    "unowned": "is held by no worker",
    "finished": "was read to its end",
}


def _explanation(shard: FleetShard, situation: list[str], remedy: str | None) -> Explanation:
    return Explanation(
        stream=shard.stream, shard_id=shard.shard_id, state=shard.state, situation=tuple(situation), remedy=remedy
    )


def _holder(shard: FleetShard, owner: FleetMember | None) -> str:
    if shard.owner is None:
        return "" if shard.state in {"unowned", "waiting"} else "No worker holds it."
    if owner is None:
        return f"Its last holder, {shard.owner}, is no longer known."
    if owner.state in {"left", "sealed"}:
        how = "has stopped gracefully" if owner.state == "left" else "was declared dead by the others"
        return f"Its last holder, {owner.worker_id}, {how}."
    beat = (
        f", whose last heartbeat was {ago(owner.heartbeat_age)} ago" if owner.is_live and owner.heartbeat_seen else ""
    )
    return f"{owner.worker_id} holds it{beat}."


def _position(shard: FleetShard) -> str:
    if shard.checkpoint is None:
        where = f"It has no checkpoint yet: it starts at {shard.starts_at}"
    else:
        where = f"Everything up to {shard.checkpoint} is handled"
        if shard.checkpointed_seconds is not None:
            where += f", committed {ago(max(0.0, time.time() - shard.checkpointed_seconds))} ago"
    if shard.millis_behind_latest is None:
        return f"{where}."
    behind = "it is at the tip" if not shard.millis_behind_latest else f"it is {lag(shard.millis_behind_latest)} behind"
    return f"{where}; {behind}, at {rate(shard.records_per_second or 0.0)} records per second."


def _why(shard: FleetShard, owner: FleetMember | None, status: FleetStatus) -> tuple[list[str], str | None]:
    """Why it is stalled, and what to do."""
    match shard.state:
        case "stopped":
            return _why_stopped(shard, status)
        case "waiting":
            return _why_waiting(shard, status)
        case "orphaned":
            return _why_orphaned(owner, status)
        case "unowned":
            return _why_unowned(shard, status)
        case "paused":
            return ["It is paused in the lease store."], "resume it"
        case "stalled":
            return _why_stalled(shard, owner)
        case _:
            return _why_slow(shard), None


def _why_stopped(shard: FleetShard, status: FleetStatus) -> tuple[list[str], str]:
    stopped = shard.stopped
    assert stopped is not None
    since = timestamp(stopped.stopped_seconds)
    if stopped.position is None:
        return [f"It stopped at {since}: {stopped.reason}."], (
            f"find out what kills its workers at that record, then start a worker again: {_RETRIED}"
        )
    record = f"record {stopped.position} of key {stopped.partition_key!r}"
    start = "start" if not status.live_members else "restart"
    sentences = [
        f"It stopped at {since} at {record}: {stopped.reason}.",
        "Its checkpoint stays before that record: nothing is skipped.",
    ]
    return sentences, f"fix the handler for that record, and {start} a worker: {_RETRIED}"


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
    why, remedy = _waits_for([found[parent_id] for parent_id in sorted(found)])
    ended = f"{' and '.join(sorted(found))} {_agree(len(found), 'has', 'have')} been read to the end"
    return Explanation(
        stream=stream,
        shard_id=shard.shard_id,
        state="waiting",
        situation=(
            f"{shard.shard_id} of {stream} {_STATE_PHRASES['waiting']}.",
            f"It has no lease yet; one is created when {ended}.",
            *why,
        ),
        remedy=remedy,
    )


def _why_waiting(shard: FleetShard, status: FleetStatus) -> tuple[list[str], str]:
    return _waits_for(
        [other for other in status.shards if other.stream == shard.stream and other.shard_id in shard.waits_for]
    )


def _waits_for(parents: list[FleetShard]) -> tuple[list[str], str]:
    said = [f"{parent.shard_id} {_STATE_PHRASES[parent.state]}{_behind(parent)}" for parent in parents]
    remedy = f"nothing to do: it starts when {_agree(len(parents), 'it is', 'they are')} finished"
    if stalled := [parent.shard_id for parent in parents if parent.state != "moving"]:
        remedy += f"; see why {' and '.join(stalled)} {_agree(len(stalled), 'is', 'are')} stalled"
    return [f"To keep the order per key it waits for its parents: {', '.join(said)}."], remedy


def _behind(shard: FleetShard) -> str:
    return "" if shard.millis_behind_latest is None else f" ({lag(shard.millis_behind_latest)} behind)"


def _why_orphaned(owner: FleetMember | None, status: FleetStatus) -> tuple[list[str], str]:
    assert owner is not None
    others = [member for member in status.live_members if member.member_id != owner.member_id]
    sentences = [_unwell(owner)]
    if owner.state == "silent":
        sentences.append("It starts no handler calls until the lease store answers it again.")
    if others:
        return sentences, f"nothing to do: one of {counted(len(others), 'live worker')} takes it in a moment"
    return sentences, "start a worker: it takes the shard at once, or after the other's expiry"


def _why_unowned(shard: FleetShard, status: FleetStatus) -> tuple[list[str], str]:
    reason = f"{(shard.reason or '')[:1].upper()}{(shard.reason or '')[1:]}."
    live = status.live_members
    if not live:
        return [reason], "start a worker, for example with `anabranch run module:consumer`"
    if all(member.draining for member in live):
        return [reason], "start a worker: the present ones are stopping and take no shards"
    if "max_shards" in reason:
        return [reason], "start another worker, or raise max_shards in LeaseSettings"
    return [reason], f"nothing to do: one of {counted(len(live), 'live worker')} takes it in a moment"


_SLOW_KEYS: Final = "check the handlers of those records: they are running or waiting, or their retries are due later"
_REMEDIES: Final = (
    (
        "ignores its timeout",
        "make the handler return: a call in a thread cannot be stopped, one in a process can",
    ),
    ("has not been finished", "check that record's handler: it is running or waiting, or its retry is due later"),
    (
        "bytes of later records are finished",
        "check that record's handler; a larger replay_bytes_max lets other keys go further",
    ),
    ("have unfinished records", _SLOW_KEYS),
    ("wait for unfinished records", _SLOW_KEYS),
    ("byte budget", "nothing is lost: reading continues as records finish; if that is too slow, raise the budget"),
    (
        "cancelled handler calls still run",
        "make those handlers return when they are cancelled: then the shard continues",
    ),
    (
        "no heartbeat was acknowledged",
        "check that this worker can reach the lease store; it continues when the store answers",
    ),
    ("being handed over", "nothing to do: its new holder continues"),
    ("waits for its turn", "nothing to do: its turn comes after the record that is being tried now"),
    ("Consumer.pause()", "call Consumer.resume() in its program"),
)
"""Advice by a text in the worker's reason."""


def _why_stalled(shard: FleetShard, owner: FleetMember | None) -> tuple[list[str], str]:
    reason = " ".join((shard.reason or "").split())
    sentences = [f"Its worker says: {reason}."]
    if (remedy := next((remedy for words, remedy in _REMEDIES if words in reason), None)) is not None:
        return sentences, remedy
    if owner is not None and not owner.reads_healthy:
        return sentences, "fix what the error names; reads are retried"
    return sentences, "it is retried; if it persists, fix what the error names"


def _why_slow(shard: FleetShard) -> list[str]:
    if shard.takes_without_progress > 1:
        return [f"{shard.takes_without_progress} holders in a row have made no progress on it."]
    return []


def _children(shard: FleetShard) -> str:
    if not shard.children:
        return "It has no children: nothing follows it."
    return f"Its records go on in {' and '.join(shard.children)}."


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
_COLUMNS_MAX: Final = 100
_INDENT: Final = "  "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_application_argument(parser)
    parser.add_argument("shard", nargs="?", type=shard_id_argument, metavar="SHARD", help="its id, or its number alone")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    status = asyncio.run(_look(arguments))
    shards = status.stalled_shards
    if arguments.shard is not None:
        shards = tuple(shard for shard in status.shards if shard.shard_id == arguments.shard)
    explanations = [explain_shard(shard, status) for shard in shards]
    if arguments.shard is not None and not shards:
        explanations = _explain_unleased(arguments, status)
    if arguments.json:
        print_json(explanations)
        return DONE
    if arguments.shard is None:
        _print(explain_fleet(status))
    for number, explanation in enumerate(explanations):
        if number or arguments.shard is None:
            print()
        _print_explanation(explanation)
    return DONE


def _explain_unleased(arguments: argparse.Namespace, status: "FleetStatus") -> list[Explanation]:
    """A shard gets its lease when its parents have been read to the end; until then only the stream lists it."""
    missing = f"application {status.app!r} has no lease for {arguments.shard}"
    reads = f"It reads: {', '.join(shard.shard_id for shard in status.unfinished_shards) or 'none'}"
    streams: dict[str, dict[str, Shard]] = {}
    for stream in status.streams:
        try:
            with connect(arguments) as connection:
                listed = connection.run(connection.shards(parse_stream(stream)))
        except (AnabranchError, CommandFailed) as error:
            raise CommandFailed(
                f"{missing}. {reads}; if it is a child of one of these, its lease is created when that one has been "
                f"read to the end. Stream {stream} could not be listed to find out: {error}"
            ) from error
        streams[stream] = {shard.shard_id: shard for shard in listed}
    holding = {stream: listed for stream, listed in streams.items() if arguments.shard in listed}
    if not holding:
        raise CommandFailed(f"{missing}, and no stream of it has that shard. {reads}")
    explanations = [
        explanation
        for stream, listed in holding.items()
        if (explanation := explain_unleased(listed[arguments.shard], listed, stream, status)) is not None
    ]
    if not explanations:
        raise CommandFailed(
            f"{missing}: workers find new shards when they list the stream, every 30 s by default; a shard that was "
            f"closed before the application started is not read. {reads}"
        )
    return explanations


async def _look(arguments: argparse.Namespace) -> "FleetStatus":
    from anabranch.application import Application

    async with Application(arguments.app, leases=arguments.leases) as application:
        return await application.status(watch=True)


def _print_explanation(explanation: Explanation) -> None:
    first, *others = explanation.situation
    _print([first])
    _print(others, indent=_INDENT)
    if explanation.remedy is not None:
        _print([f"-> {explanation.remedy}"], indent=_INDENT)


def _print(sentences: list[str], *, indent: str = "") -> None:
    console = make_console()
    columns = min(_COLUMNS_MAX, console.width)
    for sentence in sentences:
        print(
            textwrap.fill(
                sentence,
                columns,
                initial_indent=indent,
                subsequent_indent=indent + ("   " if sentence.startswith("->") else ""),
                break_long_words=False,
                break_on_hyphens=False,
            )
            if console.is_terminal
            else f"{indent}{sentence}"
        )

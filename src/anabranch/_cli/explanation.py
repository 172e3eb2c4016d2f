"""A shard's situation in sentences: who holds it, where it stands, why it does not move, and what would make it move.

From a fleet's status to words, with no look at anything but the clock. Each state of a shard has its own paragraph, and
each ends in something to do, or says that nothing is to be done.
"""

import time
from collections.abc import Mapping
from typing import Final

import msgspec

from anabranch._cli.options import ago, lag, rate, timestamp
from anabranch._cli.output import counted
from anabranch._model.shards import Shard
from anabranch.reports import FleetMember, FleetShard, FleetStatus

__all__ = ["Explanation", "explain_fleet", "explain_shard", "explain_unleased"]

_RETRIED: Final = "each worker that is started after the stop tries that record once more"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One shard, as `explain --json` prints it."""

    stream: str
    shard_id: str
    state: str
    situation: tuple[str, ...]
    """Who holds it, where it stands, why it does not move."""
    remedy: str | None
    """What would make it move; None while it does, and for a shard that was read to its end."""


def explain_fleet(status: FleetStatus) -> list[str]:
    """The application as a whole."""
    live = status.live_members
    shards = status.unfinished_shards
    lines = [f"Application {status.app} reads {' and '.join(status.streams) or 'no stream yet'}."]
    if live:
        names = ", ".join(member.worker_id for member in live)
        lines.append(f"{counted(len(live), 'worker')} of it {'lives' if len(live) == 1 else 'live'}: {names}.")
    else:
        lines.append("No worker of it is alive: nothing is read until one is started.")
    lines += [_unwell(member) for member in status.members if member.state in {"silent", "dead"}]
    still = status.still_shards
    if shards and not still:
        lines.append(f"All of its {counted(len(shards), 'shard')} move.")
    elif still:
        lines.append(
            f"{len(still)} of its {counted(len(shards), 'shard')} {_agree(len(still), 'does', 'do')} not move."
        )
    return lines


def _unwell(member: FleetMember) -> str:
    if member.state == "dead":
        return f"The process of {member.worker_id} is gone; it did not say goodbye."
    return (
        f"{member.worker_id} has shown no life for {member.heartbeat_age:.0f} s: it is paused, overloaded, or cut off "
        "from the lease store."
    )


def explain_shard(shard: FleetShard, status: FleetStatus) -> Explanation:
    owner = next((member for member in status.members if member.member_id == shard.owner), None)
    situation = [f"{shard.shard_id} of {shard.stream} {_SAID[shard.state]}."]
    if shard.state == "finished":
        situation.append(_children(shard))
        return _explanation(shard, situation, None)
    why, remedy = _why(shard, owner, status)
    situation += [_holder(shard, owner), _position(shard), *why]
    return _explanation(shard, [sentence for sentence in situation if sentence], remedy)


_SAID: Final = {
    "moving": "moves",
    "still": "stands still",
    "stopped": "has stopped",
    "paused": "is paused",
    "waiting": "waits for its parents",
    "orphaned": "is held by a worker that shows no life",
    "unowned": "is held by nobody",
    "finished": "was read to its end",
}


def _explanation(shard: FleetShard, situation: list[str], remedy: str | None) -> Explanation:
    return Explanation(
        stream=shard.stream, shard_id=shard.shard_id, state=shard.state, situation=tuple(situation), remedy=remedy
    )


def _holder(shard: FleetShard, owner: FleetMember | None) -> str:
    if shard.owner is None:
        return "" if shard.state in {"unowned", "waiting"} else "Nobody holds it."
    if owner is None:
        return f"Its last holder, {shard.owner}, is no longer known."
    if owner.state in {"left", "sealed"}:
        how = "has stopped in order" if owner.state == "left" else "was given up by the others"
        return f"Its last holder, {owner.worker_id}, {how}."
    beat = f", whose heart beat {ago(owner.heartbeat_age)} ago" if owner.is_live and owner.beats else ""
    return f"{owner.worker_id} holds it{beat}."


def _position(shard: FleetShard) -> str:
    if shard.checkpoint is None:
        where = f"Nothing of it is committed yet: it begins at {shard.starts_at}"
    else:
        where = f"Everything up to {shard.checkpoint} is handled"
        if shard.checkpointed_seconds is not None:
            where += f", committed {ago(max(0.0, time.time() - shard.checkpointed_seconds))} ago"
    if shard.millis_behind_latest is None:
        return f"{where}."
    behind = "it is at the tip" if not shard.millis_behind_latest else f"it is {lag(shard.millis_behind_latest)} behind"
    return f"{where}; {behind}, at {rate(shard.records_per_second or 0.0)} records a second."


def _why(shard: FleetShard, owner: FleetMember | None, status: FleetStatus) -> tuple[list[str], str | None]:
    """Why it does not move, and what would make it."""
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
            return ["Its row in the lease store says that it is paused."], "it goes on when it is resumed"
        case "still":
            return _why_still(shard, owner)
        case _:
            return _why_slow(shard), None


def _why_stopped(shard: FleetShard, status: FleetStatus) -> tuple[list[str], str]:
    stopped = shard.stopped
    assert stopped is not None
    since = timestamp(stopped.stopped_seconds)
    if stopped.position is None:
        return [f"It stopped at {since}: {stopped.reason}."], (
            f"find out what ends its workers there, and start one again: {_RETRIED}"
        )
    record = f"record {stopped.position} of key {stopped.partition_key!r}"
    start = "start" if not status.live_members else "restart"
    sentences = [
        f"It stopped at {since} at {record}: {stopped.reason}.",
        "Its checkpoint stays before that record: nothing is skipped.",
    ]
    return sentences, f"let the handler take that record, and {start} a worker: {_RETRIED}"


def explain_unleased(shard: Shard, listed: Mapping[str, Shard], stream: str, status: FleetStatus) -> Explanation | None:
    """A shard that is listed and has no lease yet, by its ancestors that are still being read; None if none is."""
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
            f"{shard.shard_id} of {stream} {_SAID['waiting']}.",
            f"It has no lease yet: that is created when {ended}.",
            *why,
        ),
        remedy=remedy,
    )


def _why_waiting(shard: FleetShard, status: FleetStatus) -> tuple[list[str], str]:
    return _waits_for(
        [other for other in status.shards if other.stream == shard.stream and other.shard_id in shard.waits_for]
    )


def _waits_for(parents: list[FleetShard]) -> tuple[list[str], str]:
    said = [f"{parent.shard_id} {_SAID[parent.state]}{_behind(parent)}" for parent in parents]
    remedy = f"it begins by itself when {_agree(len(parents), 'it is', 'they are')} finished"
    if stuck := [parent.shard_id for parent in parents if parent.state != "moving"]:
        remedy += f"; see why {' and '.join(stuck)} {_agree(len(stuck), 'does', 'do')} not move"
    return [f"Records of a key are in order only if its parents are finished first: {', '.join(said)}."], remedy


def _behind(shard: FleetShard) -> str:
    return "" if shard.millis_behind_latest is None else f" ({lag(shard.millis_behind_latest)} behind)"


def _why_orphaned(owner: FleetMember | None, status: FleetStatus) -> tuple[list[str], str]:
    assert owner is not None
    others = [member for member in status.live_members if member.member_id != owner.member_id]
    sentences = [_unwell(owner)]
    if owner.state == "silent":
        sentences.append("It starts nothing more by itself until the lease store answers it again.")
    if others:
        return sentences, f"nothing to do: one of {counted(len(others), 'live worker')} takes it in a moment"
    return sentences, "start a worker: it takes the shard at once, or after the other's expiry"


def _why_unowned(shard: FleetShard, status: FleetStatus) -> tuple[list[str], str]:
    reason = f"{(shard.reason or '')[:1].upper()}{(shard.reason or '')[1:]}."
    live = status.live_members
    if not live:
        return [reason], "start a worker, for example by `anabranch run module:consumer`"
    if all(member.draining for member in live):
        return [reason], "start a worker: those that stop take nothing more"
    if "max_shards" in reason:
        return [reason], "start another worker, or raise max_shards in LeaseSettings"
    return [reason], f"nothing to do: one of {counted(len(live), 'live worker')} takes it in a moment"


_SLOW_KEYS: Final = (
    "look at the handlers of those records: they run, wait for something, or their retries are due later"
)
_REMEDIES: Final = (
    (
        "ignores its time-out",
        "let the handler end where it is: a call in a thread cannot be ended, one in a process can",
    ),
    ("has not been finished", "look at that record's handler: it runs, waits for something, or its retry is due later"),
    ("bytes of later ones are finished", "look at that record's handler; replay_bytes_max lets the others go further"),
    ("have unfinished records", _SLOW_KEYS),
    ("behind unfinished records", _SLOW_KEYS),
    ("byte budget", "nothing is lost: it goes on as records are finished; if that is too slow, raise the budget"),
    ("told to end still run", "let those handlers end when they are cancelled: the shard moves on then"),
    ("no heartbeat was acknowledged", "see whether the lease store answers there; when it does, it goes on by itself"),
    ("being handed over", "nothing to do: it moves on with its new holder"),
    ("waits for its turn", "nothing to do: its turn comes when the record that is tried now has ended"),
    ("Consumer.pause()", "its program goes on by Consumer.resume()"),
)
"""What the words of a worker's reason ask for."""


def _why_still(shard: FleetShard, owner: FleetMember | None) -> tuple[list[str], str]:
    reason = " ".join((shard.reason or "").split())
    sentences = [f"Its worker says: {reason}."]
    if (remedy := next((remedy for words, remedy in _REMEDIES if words in reason), None)) is not None:
        return sentences, remedy
    if owner is not None and not owner.reads_healthy:
        return sentences, "put right what the error names: reads are tried again by themselves"
    return sentences, "it is tried again by itself; if it stays, put right what is named"


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

"""When a shard may start, and what its end makes.

Rules that hold here:
- A lease waits for those of its parents that have a row when it is made, for good (rule S1). It may start when each of
  them is finished or has no row any more; rows go only by clean-up. Listings never open a gate, nor does anybody's
  inability to own a shard (rule S7).
- A merged shard may have a parent that has no row *yet*, since that parent's own parent is still being read. Its row is
  made first, so that there is something to wait for: otherwise the child would start before that parent.
- A shard is written as finished only after the rows of its children exist (rule S4). Children that do not cover its
  hash keys are not all of them: the end waits, and says why.
- A shard that the service does not know is trimmed only if the stream is still the same one (rule S3). Its heirs are
  the oldest shards left that no other lease leads to, and they wait for it: its owner may still have records in hand.
- Who finishes a child's last parent takes the child at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._core.shards.bootstrap import missing_leases
from anabranch._core.shards.graph import Ids, ShardGraph, ancestors_by_keys, gaps, unread_since
from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow, StreamRow
from anabranch._model.shards import Shard
from anabranch._model.start_positions import TRIM_HORIZON
from anabranch._wire.messages import StreamSummary

CHILDREN_UNKNOWN: Final = "children unknown"
"""The reason of a shard that has been read to its end, while no source names all its children yet."""

_SAME_CREATION_SECONDS: Final = 1.0
"""JSON and CBOR round a stream's creation time differently; deleting and creating one anew takes longer than this."""


class ShardEnd(msgspec.Struct, frozen=True):
    """What the end of a shard writes: the rows in this order, each put if absent; only then how it finished."""

    rows: tuple[LeaseRow, ...]
    finish: Finish


def blocked_by(row: LeaseRow, unfinished: Collection[LeaseKey]) -> tuple[str, ...]:
    """The parents that keep this shard from starting. `unfinished` are the keys of all unfinished leases."""
    stream_key, generation = row.key.stream_key, row.key.generation
    return tuple(parent for parent in row.waits_for if LeaseKey(stream_key, generation, parent) in unfinished)


def adoptable(children: Iterable[LeaseRow], unfinished: Collection[LeaseKey]) -> tuple[LeaseRow, ...]:
    """Of a finished shard's children, as they stand now, those that its last owner takes at once."""
    return tuple(
        row for row in children if row.owner is None and not row.is_finished and not blocked_by(row, unfinished)
    )


def plan_end(
    row: LeaseRow,
    graph: ShardGraph,
    scope: Mapping[str, Shard] | None,
    rows: Sequence[LeaseRow],
    read_through_seconds: float | None = None,
) -> ShardEnd | None:
    """The end of a shard that was read to its end; None while its children are unknown: list, then ask again.

    `scope` is a complete listing made since the end was seen, None if there is none: children whose parents all have
    rows need none. `rows` are all of this stream and generation, finished ones included. It was read until
    `read_through_seconds` (rule T4).
    """
    children = sorted(graph.children(row.key.shard_id))
    if not _are_complete(graph, row.key.shard_id, children):
        return None
    with_rows = {other.key.shard_id: None for other in (*rows, row)}
    is_simple = all(parent in with_rows for child in children for parent in graph.parents(child))
    if scope is None and not is_simple:
        return None
    above = () if scope is None or is_simple else _unmade_ancestors(graph, scope, children, with_rows)
    made = [shard_id for shard_id in (*above, *children) if shard_id not in with_rows]
    known = with_rows | dict.fromkeys(made)
    now = [*rows, replace(row, checkpoint=Checkpoint(seen_through_seconds=read_through_seconds))]
    return ShardEnd(tuple(_row(row, each, graph, now, known) for each in made), Finish("end", tuple(children)))


def _are_complete(graph: ShardGraph, shard_id: str, children: Sequence[str]) -> bool:
    ranges = [known for child in children if (known := graph.hash_key_range(child)) is not None]
    own = graph.hash_key_range(shard_id)
    return bool(children) and len(ranges) == len(children) and (own is None or not gaps(ranges, own))


def _unmade_ancestors(
    graph: ShardGraph, scope: Mapping[str, Shard], children: Sequence[str], with_rows: Ids
) -> list[str]:
    """Those from whom the children descend and that are still to be read: in scope, without a row, and above no row."""
    done = with_rows | graph.ancestors(with_rows)
    found = [shard_id for shard_id in graph.ancestors(children) if shard_id in scope and shard_id not in done]
    # An ancestor has fewer ancestors than its descendants: parents are made before what waits for them.
    return sorted(found, key=lambda shard_id: (len(graph.ancestors([shard_id])), shard_id))


def _row(ended: LeaseRow, shard_id: str, graph: ShardGraph, rows: Sequence[LeaseRow], known: Ids) -> LeaseRow:
    # One that was read to its end has rows below it to wait for. One that was trimmed may have none, and only its own
    # row knows its fence token (rule U3).
    older = (
        other.key.shard_id
        for other in ancestors_by_keys(graph, shard_id, rows)
        if other.finish is None or other.finish.reason == "trimmed"
    )
    parents = (parent for parent in graph.parents(shard_id) if parent in known)
    return LeaseRow(
        key=LeaseKey(ended.key.stream_key, ended.key.generation, shard_id),
        waits_for=tuple(sorted({*parents, *older})),
        hash_key_range=graph.hash_key_range(shard_id),
        checkpoint=Checkpoint(seen_through_seconds=unread_since(graph, shard_id, rows, known)),
    )


def plan_trimmed(
    stream: StreamRow,
    row: LeaseRow,
    graph: ShardGraph,
    scope: Mapping[str, Shard],
    rows: Sequence[LeaseRow],
    read_through_seconds: float | None = None,
) -> ShardEnd:
    """The end of a shard that was proved gone before it was read to its end.

    `scope` is a listing made since then. What this lease alone accounted for is its inheritance: not always its own
    hash keys only, since an earlier one that was trimmed may have left a share to it. Of its keys nothing was read that
    came after `read_through_seconds`; where that is unknown, nothing that ever came (rule T4).
    """
    since_seconds = stream.created_seconds if read_through_seconds is None else read_through_seconds
    now = replace(row, finish=Finish("trimmed"), checkpoint=Checkpoint(seen_through_seconds=since_seconds))
    others = [other for other in rows if other.key != row.key]
    left = missing_leases(stream, graph, scope, [*others, now])
    heirs = tuple(
        replace(
            heir,
            waits_for=tuple(sorted({row.key.shard_id, *heir.waits_for})),
            start=TRIM_HORIZON,
        )
        for heir in left
    )
    with_rows = {other.key.shard_id for other in others}
    children = {heir.key.shard_id for heir in heirs} | {
        child for child in graph.children(row.key.shard_id) if child in with_rows
    }
    return ShardEnd(heirs, Finish("trimmed", tuple(sorted(children))))


def judge_missing_shard(
    stream: StreamRow, summary: StreamSummary | None
) -> Literal["trimmed", "stream_deleted", "stream_recreated"]:
    """Why the service does not know a shard, by what it says of the stream (None: it knows no such stream)."""
    if summary is None or summary.status == "DELETING":
        return "stream_deleted"
    moved_seconds = abs(summary.created_seconds - stream.created_seconds)
    if summary.arn != stream.arn or moved_seconds >= _SAME_CREATION_SECONDS:
        return "stream_recreated"
    return "trimmed"


def removable(rows: Sequence[LeaseRow], graph: ShardGraph, listed_now: Collection[str]) -> tuple[LeaseRow, ...]:
    """Finished rows that may be deleted as soon as the service proves that their shards are gone (rule S3).

    `rows` are all of one stream and generation; `listed_now` are the shards of a complete, recent listing.
    """
    by_id = {row.key.shard_id: row for row in rows}
    united = graph.united(rows=rows)
    waiting: dict[str, list[str]] = {}
    for row in rows:
        for older in row.waits_for:
            waiting.setdefault(older, []).append(row.key.shard_id)
    return tuple(
        row
        for row in rows
        if row.finish is not None
        and row.key.shard_id not in listed_now
        and _is_followed(row, row.finish, waiting.get(row.key.shard_id, ()), by_id)
        and not any(parent in by_id for parent in united.parents(row.key.shard_id))
    )


def _is_followed(row: LeaseRow, finish: Finish, waiting: Iterable[str], by_id: Mapping[str, LeaseRow]) -> bool:
    followers = [by_id.get(name) for name in (*finish.children, *waiting)]
    if not all(_has_begun(follower) for follower in followers):
        return False
    if finish.reason == "end" or row.hash_key_range is None:
        return True
    ranges = [follower.hash_key_range for follower in followers if follower and follower.hash_key_range]
    return not gaps(ranges, row.hash_key_range)


def _has_begun(child: LeaseRow | None) -> bool:
    """A child without a row is not begun but lost: its parent's row is what it will be made again from."""
    return child is not None and (child.is_finished or child.checkpoint.watermark is not None)

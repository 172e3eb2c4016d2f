"""Which lease rows have served: candidates for removal, which the service must still prove to be gone.

A finished row keeps its children's gate shut or open, keeps a listed shard from being read again, and has the fence
token that those after it go above (rule U3). So it goes only when its shard is gone from the stream, all that follow it
have begun, and no older row is left above it (rule S6): rows go from the oldest on, and what is left always accounts
for what went. Its children follow it, and every row that was made to wait for it. One that was trimmed may have left
some of its hash keys to shards that another row will name: it stays until those have begun, too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from anabranch._core.shards.coverage import gaps
from anabranch._core.shards.graph import ShardGraph
from anabranch._model.leases import Finish, LeaseRow

__all__ = ["removable"]


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

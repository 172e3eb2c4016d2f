"""Which lease rows have served: candidates for removal, which the service must still prove to be gone.

A finished row keeps its children's gate shut or open, and keeps a listed shard from being read again. So it goes only
when its shard is gone from the stream, its children have begun, and no older row is left above it (rule S6): rows go
from the oldest on, and what is left always accounts for what went.
"""

from collections.abc import Collection, Sequence

from anabranch._core.shards.graph import ShardGraph
from anabranch._model.leases import LeaseRow

__all__ = ["removable"]


def removable(rows: Sequence[LeaseRow], graph: ShardGraph, listed_now: Collection[str]) -> tuple[LeaseRow, ...]:
    """Finished rows that may be deleted as soon as the service proves that their shards are gone (rule S3).

    `rows` are all of one stream and generation; `listed_now` are the shards of a complete, recent listing.
    """
    by_id = {row.key.shard_id: row for row in rows}
    united = graph.united(rows=rows)
    return tuple(
        row
        for row in rows
        if row.finish is not None
        and row.key.shard_id not in listed_now
        and all(_has_begun(by_id.get(child)) for child in row.finish.children)
        and not any(parent in by_id for parent in united.parents(row.key.shard_id))
    )


def _has_begun(child: LeaseRow | None) -> bool:
    """A child without a row is not begun but lost: its parent's row is what it will be made again from."""
    return child is not None and (child.is_finished or child.checkpoint.watermark is not None)

"""What Kinesis says of a stream: its summary once it can be read, and whole listings of its shards."""

from anabranch._engine.outside import Outside
from anabranch._engine.shards.kinesis_calls import PATIENCE_MS, patiently
from anabranch._model.shard_filters import ShardFilter
from anabranch._model.shards import Shard
from anabranch._model.streams import StreamName
from anabranch._wire.messages import ListShardsResponse, StreamSummary
from anabranch.errors import StreamNotFoundError, TransportError

__all__ = ["await_stream", "find_summary", "is_open", "list_all_shards"]

CREATING_POLL_MS = 500


async def await_stream(outside: Outside, stream: StreamName, timeout_ms: int) -> StreamSummary:
    """The summary of a stream that can be read; waits for one that is being created, and while it is throttled."""
    clock = outside.clock
    deadline_ms = clock.now_ms() + timeout_ms
    while True:
        summary = await patiently(
            outside,
            lambda: outside.kinesis.describe_stream_summary(stream),
            answered_ms=deadline_ms - clock.now_ms(),
        )
        if summary.status != "CREATING":
            return summary
        if clock.now_ms() >= deadline_ms:
            raise TransportError(f"stream {stream} is still CREATING after {timeout_ms / 1000:.0f} s (start_timeout)")
        await clock.sleep_until_ms(clock.now_ms() + CREATING_POLL_MS)


async def find_summary(outside: Outside, stream: StreamName) -> StreamSummary | None:
    """None if there is no such stream."""
    try:
        return await patiently(outside, lambda: outside.kinesis.describe_stream_summary(stream))
    except StreamNotFoundError:
        return None


async def list_all_shards(
    outside: Outside, stream: StreamName, shard_filter: ShardFilter | None, *, answered_ms: int = PATIENCE_MS
) -> list[Shard]:
    """All pages of one listing; `answered_ms` as in `patiently`, for each page."""
    shards: list[Shard] = []
    token: str | None = None
    while True:
        page = await _list_page(outside, stream, shard_filter, token, answered_ms)
        shards.extend(page.shards)
        token = page.next_token
        if token is None:
            return shards


async def is_open(outside: Outside, stream: StreamName, shard_id: str) -> bool:
    """Whether a listing shows the shard, and does not show it closed."""
    listed = await list_all_shards(outside, stream, None)
    return any(shard.is_open for shard in listed if shard.shard_id == shard_id)


async def _list_page(
    outside: Outside, stream: StreamName, shard_filter: ShardFilter | None, token: str | None, answered_ms: int
) -> ListShardsResponse:
    """The service takes a filter with the first page only: the token stands for it after that."""
    return await patiently(
        outside,
        lambda: outside.kinesis.list_shards(stream, shard_filter=None if token else shard_filter, next_token=token),
        answered_ms=answered_ms,
    )

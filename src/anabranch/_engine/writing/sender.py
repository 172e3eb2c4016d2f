"""The producer's calls to the service. Every call ends in a value: the answer, or the error that came instead of it."""

from anabranch._core.writing.collection import Call
from anabranch._model.shard_filters import AT_LATEST
from anabranch._model.shards import Shard
from anabranch._model.streams import StreamName
from anabranch._ports.kinesis_writing import KinesisWriting
from anabranch._wire.messages import PutRecordsResponse, StreamSummary
from anabranch.errors import AccessDeniedError, AnabranchError, TransportError

__all__ = ["list_stream", "send"]


async def send(kinesis: KinesisWriting, stream: StreamName, call: Call) -> PutRecordsResponse | AnabranchError:
    try:
        return await kinesis.put_records(stream, call.entries)
    except AnabranchError as error:
        return error
    except Exception as error:  # noqa: BLE001 -- supervisor: a fault of ours must not hold back the records of this call
        return TransportError(f"the call ended in an unexpected error: {error!r}")


async def list_stream(
    kinesis: KinesisWriting, stream: StreamName, *, with_summary: bool
) -> tuple[list[Shard], StreamSummary | None] | AnabranchError:
    """All open shards, and the summary if it is wanted and permitted."""
    try:
        summary = await _describe(kinesis, stream) if with_summary else None
        answer = await kinesis.list_shards(stream, shard_filter=AT_LATEST)
        shards = list(answer.shards)
        while answer.next_token is not None:
            answer = await kinesis.list_shards(stream, next_token=answer.next_token)
            shards += answer.shards
    except AnabranchError as error:
        return error
    except Exception as error:  # noqa: BLE001 -- supervisor: the map is asked for again, records go alone meanwhile
        return TransportError(f"the listing ended in an unexpected error: {error!r}")
    return shards, summary


async def _describe(kinesis: KinesisWriting, stream: StreamName) -> StreamSummary | None:
    try:
        return await kinesis.describe_stream_summary(stream)
    except AccessDeniedError:
        return None  # many writers may not describe: then keys decide the shard, as they nearly always do

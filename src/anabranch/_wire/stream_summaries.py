"""Bodies of DescribeStreamSummary."""

from typing import Final

import msgspec

from anabranch._model.streams import StreamName
from anabranch._wire.bodies import AnswerDecoder, Buffer, encode_request, stream_members
from anabranch._wire.messages import StreamSummary
from anabranch.limits import KIB, RECORD_BYTES_DEFAULT_MAX

__all__ = ["decode_describe_stream_summary", "encode_describe_stream_summary"]


class _StreamModeDetails(msgspec.Struct, rename="pascal"):
    stream_mode: str


class _Summary(msgspec.Struct, rename="pascal"):
    stream_name: str
    stream_arn: str = msgspec.field(name="StreamARN")
    stream_status: str
    retention_period_hours: int
    stream_creation_timestamp: float
    open_shard_count: int
    stream_mode_details: _StreamModeDetails | None = None
    consumer_count: int | None = None
    max_record_size_in_kib: int | None = msgspec.field(name="MaxRecordSizeInKiB", default=None)
    record_distribution_strategy: str | None = None


class _DescribeStreamSummary(msgspec.Struct, rename="pascal"):
    stream_description_summary: _Summary


_DESCRIBE: Final = AnswerDecoder("DescribeStreamSummary", _DescribeStreamSummary)


def encode_describe_stream_summary(stream: StreamName) -> list[bytes]:
    return encode_request(stream_members(stream))


def decode_describe_stream_summary(body: Buffer, *, server_seconds: float | None = None) -> StreamSummary:
    summary = _DESCRIBE.decode(body).stream_description_summary
    mode = summary.stream_mode_details
    record_kib_max = summary.max_record_size_in_kib
    return StreamSummary(
        name=summary.stream_name,
        arn=summary.stream_arn,
        status=summary.stream_status,
        created_seconds=summary.stream_creation_timestamp,
        retention_hours=summary.retention_period_hours,
        open_shard_count=summary.open_shard_count,
        stream_mode="PROVISIONED" if mode is None else mode.stream_mode,
        record_bytes_max=RECORD_BYTES_DEFAULT_MAX if record_kib_max is None else record_kib_max * KIB,
        record_distribution=summary.record_distribution_strategy,
        consumer_count=summary.consumer_count or 0,
        server_seconds=server_seconds,
    )

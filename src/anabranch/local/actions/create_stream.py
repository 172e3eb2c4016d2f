"""CreateStream: a new stream, CREATING until the state delay is over.

Provisioned with a ShardCount, on demand without one. The shard limit is checked before anything is made of the count.
"""

from anabranch.limits import KIB, ON_DEMAND_SHARD_COUNT, RECORD_BYTES_DEFAULT_MAX
from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import in_use, invalid_argument, limit_exceeded, validation
from anabranch.local.shapes import (
    DISTRIBUTION_STRATEGY,
    MAX_RECORD_SIZE_KIB,
    NATURAL_INTEGER,
    POSITIVE_INTEGER,
    STREAM_MODE_DETAILS,
    STREAM_NAME,
    TAG_MAP,
    StructureShape,
)
from anabranch.local.state.account import Account
from anabranch.local.state.stream import Stream, StreamMode
from anabranch.local.tags import check_tags

REQUEST = StructureShape(
    {
        "StreamName": STREAM_NAME,
        "ShardCount": POSITIVE_INTEGER,
        "StreamModeDetails": STREAM_MODE_DETAILS,
        "Tags": TAG_MAP,
        "WarmThroughputMiBps": NATURAL_INTEGER,
        "MaxRecordSizeInKiB": MAX_RECORD_SIZE_KIB,
        "RecordDistributionStrategy": DISTRIBUTION_STRATEGY,
    },
    required=("StreamName",),
)

_CREATING_MAX = 5  # API: streams in CREATING at any point in time
ON_DEMAND_STREAMS_MAX = 50  # GUIDE: on-demand streams of an account


def create_stream(account: Account, request: Request, now_ms: int) -> Answer:
    name = request["StreamName"]
    if name in account.streams:
        raise in_use(f"Stream {name} under account {account.settings.account_id} already exists.")
    mode, shard_count = _mode_and_count(account, request)
    warm_throughput = _warm_throughput(account, request, mode, now_ms)
    distribution = request.get("RecordDistributionStrategy", "USER_PARTITION_KEY")
    if distribution == "AUTO" and mode != "ON_DEMAND":
        raise invalid_argument("RecordDistributionStrategy AUTO is only supported for on-demand streams.")
    tags = dict(request.get("Tags", {}))
    check_tags(tags)
    account.check_shard_room(shard_count)
    if account.enforces_limits and _count(account, status="CREATING") >= _CREATING_MAX:
        raise limit_exceeded(
            f"This request would exceed the limit of {_CREATING_MAX} streams in CREATING of account "
            f"{account.settings.account_id}."
        )
    stream = Stream(
        name=name,
        arn=account.stream_arn(name),
        created_ms=now_ms,
        status="CREATING",
        deadline_ms=None,
        mode=mode,
        tags=tags,
        max_record_kib=request.get("MaxRecordSizeInKiB", RECORD_BYTES_DEFAULT_MAX // KIB),
        warm_throughput_mibps=warm_throughput,
        distribution=distribution,
    )
    stream.open_first_shards(shard_count)
    account.add_stream(stream, now_ms)
    return {}


def _mode_and_count(account: Account, request: Request) -> tuple[StreamMode, int]:
    shard_count = request.get("ShardCount")
    details = request.get("StreamModeDetails")
    mode: StreamMode = details["StreamMode"] if details else "ON_DEMAND" if shard_count is None else "PROVISIONED"
    if mode == "PROVISIONED":
        if shard_count is None:
            raise validation("ShardCount must be provided for a stream in PROVISIONED mode.")
        return mode, shard_count
    if shard_count is not None:
        raise validation("ShardCount must not be provided for a stream in ON_DEMAND mode.")
    present = sum(stream.mode == "ON_DEMAND" for stream in account.streams.values())
    if present >= ON_DEMAND_STREAMS_MAX:
        raise limit_exceeded(
            f"This request would exceed the limit of {ON_DEMAND_STREAMS_MAX} on-demand streams of account "
            f"{account.settings.account_id} in {account.settings.region}."
        )
    return mode, ON_DEMAND_SHARD_COUNT


def _warm_throughput(account: Account, request: Request, mode: str, now_ms: int) -> int | None:
    warm_throughput: int | None = request.get("WarmThroughputMiBps")
    if warm_throughput is not None and (mode != "ON_DEMAND" or not account.commitment.is_enabled(now_ms)):
        raise validation(
            "WarmThroughputMiBps needs a stream in ON_DEMAND mode and an account with "
            "MinimumThroughputBillingCommitment enabled."
        )
    return warm_throughput


def _count(account: Account, status: str) -> int:
    return sum(stream.status == status for stream in account.streams.values())

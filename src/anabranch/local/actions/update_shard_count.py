"""UpdateShardCount: uniform scaling to a count, at most doubling or halving at a time."""

from typing import Final

from anabranch.limits import UPDATE_SHARD_COUNT_PER_DAY
from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import limit_exceeded
from anabranch.local.lookups import check_provisioned, find_active_stream
from anabranch.local.shapes import NAMED_STREAM, POSITIVE_INTEGER, StringShape, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import HOUR_MS, ScaleChange, Stream

REQUEST = StructureShape(
    {**NAMED_STREAM, "TargetShardCount": POSITIVE_INTEGER, "ScalingType": StringShape(values=("UNIFORM_SCALING",))},
    required=("TargetShardCount", "ScalingType"),
)

_SHARDS_MAX: Final = 10_000  # API


def update_shard_count(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_provisioned("UpdateShardCount", find_active_stream(account, request))
    present, target = stream.open_shard_count, request["TargetShardCount"]
    counts = f"Current open shard count: {present} Target shard count: {target}"
    if target > 2 * present:
        raise limit_exceeded(f"UpdateShardCount cannot scale up over double your current open shard count. {counts}")
    if 2 * target < present:
        raise limit_exceeded(f"UpdateShardCount cannot scale down below half your current open shard count. {counts}")
    if target > max(_SHARDS_MAX, present):
        raise limit_exceeded(f"UpdateShardCount cannot scale over {_SHARDS_MAX} shards in a stream. {counts}")
    account.check_shard_room(target - present)
    _count_call(account, stream, now_ms)
    account.update_stream(stream, now_ms, ScaleChange(target))
    return {
        "StreamName": stream.name,
        "CurrentShardCount": present,
        "TargetShardCount": target,
        "StreamARN": stream.arn,
    }


def _count_call(account: Account, stream: Stream, now_ms: int) -> None:
    recent = [called_ms for called_ms in stream.scaled_at_ms if now_ms - called_ms < 24 * HOUR_MS]
    if account.enforces_limits and len(recent) >= UPDATE_SHARD_COUNT_PER_DAY:
        raise limit_exceeded(
            f"UpdateShardCount can be called {UPDATE_SHARD_COUNT_PER_DAY} times in 24 hours for "
            f"{account.stream_label(stream)}."
        )
    stream.scaled_at_ms = [*recent, now_ms][-UPDATE_SHARD_COUNT_PER_DAY:]

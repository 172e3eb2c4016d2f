"""The table of operations, and `Call`, which finds the stream, shard, consumer or position that a request names.

An operation is a function of a call. PutRecords and SubscribeToShard are not in the table, because they do not return a
plain answer.

A lookup raises the service's error if something is missing or not ready. For operations on records, a CREATING stream
does not exist. Operations that change a stream need it to be ACTIVE.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from anabranch.limits import LIST_SHARDS_TOKEN_LIFETIME_MS
from anabranch.local.errors import (
    LocalError,
    dry_run,
    in_use,
    invalid_argument,
    not_found,
    shard_not_found,
    stream_not_found,
    validation,
)
from anabranch.local.shapes import REQUESTS
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import (
    PageToken,
    Timestamp,
    decode_token,
    full_shard_id,
    parse_sequence_number,
    shard_id_of,
)
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Consumer, Stream

Answer: TypeAlias = dict[str, Any]

_STREAM_ARN: Final = re.compile(r"arn:[^:]+:kinesis:[^:]*:(?P<account>\d{12}):stream/(?P<name>[^/]+)")
_CONSUMER_ARN: Final = re.compile(
    r"(?P<stream>arn:[^:]+:kinesis:[^:]*:\d{12}:stream/[^/]+)/consumer/(?P<name>[^/:]+):\d+"
)


class Call(msgspec.Struct, frozen=True):
    operation: str
    account: Account
    request: Mapping[str, Any]
    now_ms: int

    @property
    def account_id(self) -> str:
        return self.account.settings.account_id

    def check_dry_run(self) -> None:
        if self.request.get("DryRun"):
            raise dry_run()

    # streams

    def find_stream(self) -> Stream:
        name, arn = self.request.get("StreamName"), self.request.get("StreamARN")
        if name is None and arn is None:
            raise invalid_argument("Either StreamName or StreamARN must be provided.")
        if arn is None:
            return self.find_stream_by_name(str(name))
        stream = self.find_stream_by_arn(arn)
        if name is not None and name != stream.name:
            raise invalid_argument(f"StreamName {name} and StreamARN {arn} do not name the same stream.")
        return stream

    def find_stream_by_arn(self, arn: str) -> Stream:
        found = _STREAM_ARN.fullmatch(arn)
        if found is None:
            raise invalid_argument(f"StreamARN {arn} is not the ARN of a stream.")
        if arn != self.account.stream_arn(found["name"]):
            raise stream_not_found(found["name"], found["account"])
        return self.find_stream_by_name(found["name"])

    def find_stream_by_name(self, name: str) -> Stream:
        stream = self.account.streams.get(name)
        if stream is None:
            raise stream_not_found(name, self.account_id)
        return stream

    def find_readable_stream(self) -> Stream:
        stream = self.find_stream()
        if stream.status == "CREATING":
            raise stream_not_found(stream.name, self.account_id)
        return stream

    def find_active_stream(self) -> Stream:
        stream = self.find_stream()
        self.check_active(stream)
        return stream

    def check_active(self, stream: Stream) -> None:
        if stream.status != "ACTIVE":
            raise in_use(
                f"Stream {stream.name} under account {self.account_id} not ACTIVE, instead in state {stream.status}"
            )

    def check_provisioned(self, stream: Stream) -> None:
        if stream.mode != "PROVISIONED":
            raise validation(f"{self.operation} is not supported for stream {stream.name}: its mode is {stream.mode}.")

    def check_creation_time(self, stream: Stream) -> None:
        """StreamCreationTimestamp tells streams apart that had the same name."""
        asked = self.request.get("StreamCreationTimestamp")
        if asked is not None and int(asked) != int(stream.creation_timestamp):
            raise stream_not_found(stream.name, self.account_id)

    def label(self, stream: Stream) -> str:
        """Names the stream in error messages."""
        return f"stream {stream.name} under account {self.account_id}"

    def horizon_ms(self, stream: Stream) -> int:
        return stream.horizon_ms(self.now_ms, self.account.settings.time_scale)

    # shards

    def find_shard(self, stream: Stream, shard_id: str) -> Shard:
        shard = stream.shard(shard_id, self.horizon_ms(stream))
        if shard is None:
            raise shard_not_found(full_shard_id(shard_id) or shard_id, stream.name, self.account_id)
        return shard

    def find_readable_shard(self) -> tuple[Stream, Shard]:
        """The stream and the shard of a read. If there is no such stream, AWS still names the shard."""
        shard_id = self._checked_shard_id("ShardId")
        try:
            stream = self.find_readable_stream()
        except LocalError as error:
            if error.code != "ResourceNotFoundException":
                raise
            raise shard_not_found(shard_id, self._stream_name(), self.account_id) from None
        return stream, self.find_shard(stream, shard_id)

    def find_shards_to_change(self, *members: str) -> tuple[Stream, list[Shard]]:
        """For SplitShard and MergeShards: the stream, and the open shards that these members name."""
        shard_ids = [self._checked_shard_id(member) for member in members]
        stream = self.find_stream()
        return stream, [self._find_shard_to_change(stream, shard_id) for shard_id in shard_ids]

    def _checked_shard_id(self, member: str) -> str:
        shard_id = full_shard_id(self.request[member])
        if shard_id is None:
            label = f"stream {self._stream_name()} under account {self.account_id}"
            raise not_found(f"Could not find shard {self.request[member]} in {label}.")
        return shard_id

    def _stream_name(self) -> str:
        return str(self.request.get("StreamName") or self.request.get("StreamARN", "").rpartition("/")[2])

    def _find_shard_to_change(self, stream: Stream, shard_id: str) -> Shard:
        shard = stream.shard(shard_id, self.horizon_ms(stream))
        label = self.label(stream)
        if shard is None:
            raise not_found(f"Could not find shard {shard_id} in {label}.")
        if not shard.is_open:
            raise invalid_argument(
                f"Shard {shard.shard_id} in {label} has already been merged or split, "
                "and thus is not eligible for merging or splitting."
            )
        return shard

    # consumers and other resources

    def find_consumer(self) -> tuple[Stream, Consumer]:
        """By ConsumerARN, or by StreamARN and ConsumerName. All three may be given if they agree."""
        arn, name, stream_arn = (self.request.get(key) for key in ("ConsumerARN", "ConsumerName", "StreamARN"))
        if arn is None:
            if name is None or stream_arn is None:
                raise invalid_argument("Either ConsumerARN, or both StreamARN and ConsumerName, must be provided.")
            stream = self.find_stream_by_arn(stream_arn)
            if name not in stream.consumers:
                raise not_found(f"Consumer {name}, under stream {stream.name}, account {self.account_id} not found.")
            return stream, stream.consumers[name]
        stream, consumer = self.find_consumer_by_arn(arn)
        if name not in {None, consumer.name} or stream_arn not in {None, stream.arn}:
            raise invalid_argument(f"ConsumerARN {arn} conflicts with StreamARN {stream_arn} or ConsumerName {name}.")
        return stream, consumer

    def find_consumer_by_arn(self, arn: str) -> tuple[Stream, Consumer]:
        found = _CONSUMER_ARN.fullmatch(arn)
        if found is None:
            raise invalid_argument(f"ConsumerARN {arn} is not the ARN of a consumer.")
        stream = self.find_stream_by_arn(found["stream"])
        consumer = stream.consumers.get(found["name"])
        if consumer is None or consumer.arn != arn:
            raise not_found(f"Consumer {arn}, account {self.account_id} not found.")
        return stream, consumer

    def find_resource(self) -> tuple[Stream, Stream | Consumer]:
        """The stream, and the stream or consumer that ResourceARN names."""
        arn = self.request["ResourceARN"]
        if ":channel/" in arn:
            raise not_found(f"Resource {arn} not found: channels are not supported by this server.")
        if "/consumer/" in arn:
            return self.find_consumer_by_arn(arn)
        stream = self.find_stream_by_arn(arn)
        return stream, stream

    def read_token(self) -> PageToken:
        text = self.request["NextToken"]
        token = decode_token(text, PageToken)
        if token is None:
            raise invalid_argument(f"NextToken {text[:80]} is not valid.")
        if token.operation != self.operation:
            raise invalid_argument(f"NextToken {text[:80]} was not issued by {self.operation}.")
        age_ms = self.now_ms - token.issued_ms
        lifetime_ms = self.account.settings.scaled_ms(LIST_SHARDS_TOKEN_LIFETIME_MS)
        if age_ms > lifetime_ms:
            raise LocalError(
                "ExpiredNextTokenException",
                f"NextToken is expired: it was issued {age_ms} ms ago and is valid for {lifetime_ms} ms.",
            )
        return token

    # positions in a shard

    def find_position(
        self, stream: Stream, shard: Shard, kind: str, sequence_number: str | None, timestamp: float | None
    ) -> int:
        """The lowest sequence number that will be read from a starting position of this kind."""
        _check_combination(kind, sequence_number, timestamp)
        shard.log.trim(self.horizon_ms(stream))
        if sequence_number is not None:
            number = self._checked_number(stream, shard, sequence_number)
            return number if kind == "AT_SEQUENCE_NUMBER" else number + 1
        if kind == "TRIM_HORIZON":
            return shard.starting_sequence_number
        if timestamp is not None:
            return self._position_at(shard, Timestamp(timestamp).milliseconds)
        return shard.tip()

    def _checked_number(self, stream: Stream, shard: Shard, text: str) -> int:
        number = int(text)
        parts = parse_sequence_number(number)
        if parts is None:
            why = ""
        elif parts.shard_index != shard.index:
            raise invalid_argument(
                f"Invalid StartingSequenceNumber. It encodes {shard_id_of(parts.shard_index)}, "
                f"while it was used in a call to a shard with {shard.shard_id}"
            )
        elif parts.created_s != shard.created_s:
            why = " because it did not come from this stream"
        elif parts.counter > shard.counter + 1 and number != shard.ending_sequence_number:
            why = " because this shard has no such record yet"
        else:
            return number
        raise invalid_argument(
            f"StartingSequenceNumber {text} used in {self.operation} on shard {shard.shard_id} in "
            f"{self.label(stream)} is invalid{why}."
        )

    def _position_at(self, shard: Shard, at_ms: int) -> int:
        if at_ms > self.now_ms:
            raise invalid_argument(
                "The timestampInMillis parameter cannot be greater than the currentTimestampInMillis. "
                f"timestampInMillis: {at_ms}, currentTimestampInMillis: {self.now_ms}"
            )
        log = shard.log
        index = log.index_at_time(at_ms)
        return log.numbers[index] if index < len(log.numbers) else shard.tip()


def _check_combination(kind: str, sequence_number: str | None, timestamp: float | None) -> None:
    has_number = sequence_number is not None
    if kind.endswith("_SEQUENCE_NUMBER") != has_number:
        also = "and also a" if has_number else "and no"
        raise invalid_argument(
            "Must either specify (1) AT_SEQUENCE_NUMBER or AFTER_SEQUENCE_NUMBER and StartingSequenceNumber or "
            "(2) TRIM_HORIZON or LATEST and no StartingSequenceNumber. "
            f"Request specified {kind} {also} StartingSequenceNumber."
        )
    if kind == "AT_TIMESTAMP" and timestamp is None:
        raise invalid_argument(
            "Must specify timestampInMillis parameter for iterator of type AT_TIMESTAMP. "
            "Current request has no timestamp parameter."
        )
    if kind != "AT_TIMESTAMP" and timestamp is not None:
        raise invalid_argument(f"Request specified {kind} and also a timestamp: only AT_TIMESTAMP takes a timestamp.")


Perform: TypeAlias = Callable[[Call], Answer]

ACTIONS: Final[dict[str, Perform]] = {}


def action(operation: str) -> Callable[[Perform], Perform]:
    """Registers the decorated function as an operation."""
    assert operation in REQUESTS, f"{operation} has no request shape"
    assert operation not in ACTIONS, f"{operation} is registered twice"

    def register(perform: Perform) -> Perform:
        ACTIONS[operation] = perform
        return perform

    return register

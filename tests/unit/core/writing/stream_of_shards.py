"""Listings, results and a hand-driven writer for the tests of the producer's core."""

import random

from anabranch._core.writing.bundles import OutgoingRecord, WriteOptions, cost_of
from anabranch._core.writing.stream_writer import StreamWriter
from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._model.streams import Shard, StreamName
from anabranch._wire.messages import PutRecordsResponse, PutRecordsResultEntry, StreamSummary

HIGHEST = (1 << 128) - 1
MIDDLE = 1 << 127


def shard(number, low=0, high=HIGHEST, starts=1, ends=None):
    return Shard(
        shard_id=shard_id(number),
        hash_key_range=HashKeyRange(low, high),
        starting_sequence_number=starts,
        ending_sequence_number=ends,
    )


def shard_id(number):
    return f"shardId-{number:012}"


def listing(count):
    return [shard(number, *hash_range) for number, hash_range in enumerate(even_ranges(count))]


def summary(**changes):
    values = {
        "name": "orders", "arn": "arn", "status": "ACTIVE", "created_seconds": 0.0, "retention_hours": 24,
        "open_shard_count": 1,
    }  # fmt: skip
    return StreamSummary(**values | changes)


def written(sequence_number, number=0):
    return PutRecordsResultEntry(str(sequence_number), shard_id(number))


def refused(code="ProvisionedThroughputExceededException", message="Rate exceeded for shard shardId-000000000000"):
    return PutRecordsResultEntry(error_code=code, error_message=message)


class Desk:
    """A stream writer, a manual clock, and the calls without a response."""

    def __init__(self, shards=None, *, now_ms=1_000, **rules):
        self.now_ms = now_ms
        self.events = []
        self.calls = []
        self.refreshes = 0
        self.settled = []
        self.writer = StreamWriter(
            StreamName("orders"), WriteOptions(**rules), OutgoingRecord, self, entropy=random.Random(7)
        )
        if shards is not None:
            self.writer._shard_map.begin(now_ms)
            self.list(shards)

    def put(self, data=b"x", key="k", explicit_hash_key=None):
        return self.writer.put(data, key, explicit_hash_key, cost_of(data, key), self.now_ms)

    def list(self, shards, described=None):
        self.perform(self.writer.on_listing(shards, described, self.now_ms))

    def fail_listing(self, error):
        self.perform(self.writer.on_listing_failed(error, self.now_ms))

    def tick(self, later_ms=0):
        self.now_ms += later_ms
        steps = self.writer.tick(self.now_ms, self.now_ms + 5_000)
        self.perform(steps)
        return steps

    def answer(self, *slots, call=None, request_id="request-1"):
        call = self.calls.pop(0) if call is None else call
        response = PutRecordsResponse(list(slots), request_id=request_id)
        self.perform(self.writer.on_response(call, response, self.now_ms))

    def fail(self, error):
        self.perform(self.writer.on_response(self.calls.pop(0), error, self.now_ms))

    def abandon(self):
        self.perform(self.writer.abandon(None, self.now_ms))

    def perform(self, steps):
        self.calls += steps.calls
        self.refreshes += steps.refresh
        while steps.events:
            self.events.append(steps.events.popleft())
        while steps.ended:
            bundle = steps.ended.popleft()
            self.settled += [record for record in bundle.records if bundle.is_settled]
            bundle.release()

    def sent(self):
        """Data of the last call's entries."""
        return [entry.data for entry in self.calls[-1].entries]

"""Listings, results and a hand-driven pipeline for the tests of the producer's core."""

import random

from anabranch._core.writing.bundles import OutgoingRecord, cost_of
from anabranch._core.writing.pipeline import Pipeline, WriteOptions
from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._model.streams import Shard
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
    """A pipeline, a manual clock, and the calls without a response."""

    def __init__(self, shards=None, *, now_ms=1_000, **rules):
        self.now_ms = now_ms
        self.events = []
        self.calls = []
        self.refreshes = 0
        self.settled = []
        self.pipeline = Pipeline(
            "orders", WriteOptions(**rules), OutgoingRecord, entropy=random.Random(7), notify=self.events.append
        )
        if shards is not None:
            self.pipeline._shard_map.begin(now_ms)
            self.list(shards)

    def put(self, data=b"x", key="k", explicit_hash_key=None):
        return self.pipeline.put(data, key, explicit_hash_key, cost_of(data, key), self.now_ms)

    def list(self, shards, described=None):
        self.pipeline.on_listing(shards, described, self.now_ms)
        self.collect_settled()

    def tick(self, later_ms=0):
        self.now_ms += later_ms
        steps = self.pipeline.tick(self.now_ms, self.now_ms + 5_000)
        self.calls += steps.calls
        self.refreshes += steps.refresh
        self.collect_settled()
        return steps

    def answer(self, *slots, call=None, request_id="request-1"):
        call = self.calls.pop(0) if call is None else call
        self.pipeline.on_response(call, PutRecordsResponse(list(slots), request_id=request_id), self.now_ms)
        self.collect_settled()

    def fail(self, error):
        self.pipeline.on_response(self.calls.pop(0), error, self.now_ms)
        self.collect_settled()

    def collect_settled(self):
        for bundle in self.pipeline.take_settled():
            self.settled += [record for record in bundle.records if bundle.is_settled]
            bundle.release()

    def sent(self):
        """Data of the last call's entries."""
        return [entry.data for entry in self.calls[-1].entries]

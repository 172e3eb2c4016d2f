"""A simulation of the producer's pure core: a stream that reshards under load, a network that loses and delays
requests, and checkers that do not know how the producer works.

It has no event loop and no sockets, so thousands of seeds run in a minute.
"""

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field

from write_outcomes import WriteOutcomes

from anabranch._core.writing.bundles import OutgoingRecord, WriteOptions, cost_of
from anabranch._core.writing.stream_writer import StreamWriter
from anabranch._model.hash_keys import HashKeyRange, even_ranges, md5_hash_key
from anabranch._model.streams import Position, Shard, StreamName
from anabranch._wire.aggregate import open_aggregate
from anabranch._wire.messages import PutRecordsResponse, PutRecordsResultEntry, StreamSummary
from anabranch.config import ProducerSettings
from anabranch.errors import StreamNotFoundError, ThrottledError, TransportError, UnavailableError

THROTTLED = "ProvisionedThroughputExceededException"


@dataclass
class Stored:
    sequence_number: int
    entry: object


@dataclass
class StoredShard:
    shard_id: str
    range: HashKeyRange
    starts: int
    is_open: bool = True
    log: list[Stored] = field(default_factory=list)


class Stream:
    """The service's state. Sequence numbers only grow, so consumers read records in their order."""

    def __init__(self, shard_count: int) -> None:
        self.sequence_number = 0
        self.shards: dict[str, StoredShard] = {}
        self.created = 0
        self.past_lives: list[dict[str, StoredShard]] = []
        self.create(shard_count)

    def create(self, shard_count: int) -> None:
        self.past_lives.append(self.shards)
        self.shards = {}
        self.created += 1
        for hash_range in even_ranges(shard_count):
            self._add(hash_range)

    def _add(self, hash_range: HashKeyRange) -> None:
        self.sequence_number += 1
        shard_id = f"shardId-{len(self.shards):012}"
        self.shards[shard_id] = StoredShard(shard_id, hash_range, self.sequence_number)

    def open_shards(self) -> list[StoredShard]:
        return [shard for shard in self.shards.values() if shard.is_open]

    def split(self, shard: StoredShard, rng: random.Random) -> None:
        low, high = shard.range
        if low < high:
            at = low + 1 + rng.randrange(0, high - low) if rng.random() < 0.5 else (low + high) // 2 + 1
            shard.is_open = False
            self._add(HashKeyRange(low, at - 1))
            self._add(HashKeyRange(at, high))

    def merge(self, left: StoredShard, right: StoredShard) -> None:
        left.is_open = right.is_open = False
        self._add(HashKeyRange(left.range.start, right.range.end))

    def owner(self, entry) -> StoredShard:
        explicit = entry.explicit_hash_key
        key = md5_hash_key(entry.partition_key) if explicit is None else int(explicit)
        return next(shard for shard in self.open_shards() if key in shard.range)

    def write(self, entry) -> PutRecordsResultEntry:
        shard = self.owner(entry)
        self.sequence_number += 1
        shard.log.append(Stored(self.sequence_number, entry))
        return PutRecordsResultEntry(str(self.sequence_number), shard.shard_id)

    def listing(self) -> list[Shard]:
        return [
            Shard(shard_id=s.shard_id, hash_key_range=s.range, starting_sequence_number=s.starts)
            for s in self.open_shards()
        ]

    def copies(self):
        """(record id, sequence number, sub-sequence number) of all records that a consumer gets, in order."""
        for shards in (*self.past_lives, self.shards):
            found = [(stored, shard) for shard in shards.values() for stored in shard.log]
            for stored, shard in sorted(found, key=lambda pair: pair[0].sequence_number):
                aggregate = open_aggregate(stored.entry.data)
                if aggregate is None:
                    yield stored.entry.data, stored.sequence_number, -1, shard.shard_id
                elif not aggregate.misrouted(shard.range):  # our consumer and KCL skip all other aggregates
                    for index, (_, _, data) in enumerate(aggregate.sub_records()):
                        yield data, stored.sequence_number, index, shard.shard_id


class World:
    def __init__(self, seed: int, **overrides) -> None:
        self.rng = rng = random.Random(seed)
        self.stream = Stream(rng.choice([1, 2, 3, 5]))
        options = {
            "order": rng.choice(["key", "key", "none"]),
            "aggregate": rng.choice(["shard", "shard", "key", None]),
            "linger_ms": rng.choice([0, 20, 100]),
            "delivery_timeout_ms": rng.choice([2_000, 60_000, 60_000]),
            "settings": ProducerSettings(
                requests_in_flight=rng.choice([1, 2, 8]),
                aggregate_partition_key=rng.choice([None, "a"]),
                after_failure=rng.choice(["fail", "continue"]),
            ),
        } | overrides
        self.trouble = rng.choice([0.0, 0.05, 0.3])
        self.reshard_every_ms = rng.choice([0, 150, 700, 3_000])
        self.listing_trouble = rng.choice([0.0, 0.3, 0.8])
        self.is_auto = rng.random() < 0.05
        self.recreates = rng.random() < 0.1
        self.throttled = rng.choice([0.0, 0.0, 0.02, 0.1])
        self.rules = WriteOptions(**options)
        self.writer = StreamWriter(StreamName("s"), self.rules, OutgoingRecord, self, entropy=random.Random(seed + 1))
        self.now_ms = 1_000
        self.agenda: list[tuple[int, int, object]] = []
        self.ticket = 0
        self.records: list[OutgoingRecord] = []
        keeps_order = self.rules.order == "key" and not self.is_auto and not self.recreates
        self.outcomes = WriteOutcomes(keeps_order=keeps_order)
        self.in_flight_keys: dict[str, int] = defaultdict(int)
        self.zombie_copies = 0
        self.is_missing = self.noticed = self.waited_long = False

    def at(self, delay_ms: int, action) -> None:
        self.ticket += 1
        heapq.heappush(self.agenda, (self.now_ms + delay_ms, self.ticket, action))

    # what the application does

    def put_some(self) -> None:
        rng = self.rng
        for _ in range(rng.choice([1, 1, 5, 60])):
            number = len(self.records)
            key = f"key-{rng.randrange(0, 12)}"
            padding = rng.choice([0, 10, 200, 30_000]) if rng.random() < 0.3 else 8
            data = b"%d:" % number + b"x" * padding
            explicit = str(rng.getrandbits(128)) if rng.random() < 0.02 else None
            record = self.writer.put(data, key, explicit, cost_of(data, key), self.now_ms)
            self.records.append(record)
            self.outcomes.put(data, key)
        self.step()

    def see_failures(self) -> None:
        self.writer.failures.take_all()

    # what the service does

    def delete(self) -> None:
        self.is_missing = True
        self.noticed = False
        self.at(500, self.create)

    def create(self) -> None:
        """Only after the producer has seen an error, or no response for a long time."""
        if not self.noticed and not self.waited_long:
            self.waited_long = True
            self.at(61_000, self.create)
            return
        self.is_missing = False
        self.stream.create(self.rng.choice([1, 2, 4]))

    def reshard(self) -> None:
        open_shards = sorted(self.stream.open_shards(), key=lambda shard: shard.range)
        if self.rng.random() < 0.5 and len(open_shards) > 1:
            place = self.rng.randrange(0, len(open_shards) - 1)
            self.stream.merge(open_shards[place], open_shards[place + 1])
        elif len(open_shards) < 12:
            self.stream.split(self.rng.choice(open_shards), self.rng)

    def perform(self, call) -> None:
        rng, troubled = self.rng, self.rng.random() < self.trouble
        there, back = rng.randrange(1, 60), rng.randrange(1, 60)
        kind = rng.choice(["slots", "slots", "throttled", "not sent", "lost request", "lost answer", "zombie", "5xx"])
        if not troubled:
            self.at(there, lambda: self.write_and_answer(call, back))
        elif kind == "slots":
            self.at(there, lambda: self.write_and_answer(call, back, refuse=0.4))
        elif kind == "throttled":
            error = ThrottledError("slow down", operation="PutRecords", code="LimitExceededException")
            self.at(there + back, lambda: self.answer(call, error))
        elif kind == "not sent":
            self.at(5, lambda: self.answer(call, TransportError("refused", maybe_sent=False)))
        elif kind == "5xx":
            error = UnavailableError("oops", operation="PutRecords", code="InternalFailure", status=500)
            wrote = rng.random() < 0.5
            self.at(
                there, lambda: (self.write(call) if wrote else None, self.at(back, lambda: self.answer(call, error)))
            )
        else:
            if kind == "lost answer":
                self.at(there, lambda: self.write(call))
            elif kind == "zombie":
                self.zombie_copies += sum(len(bundle.records) for bundle in call.bundles)
                self.at(300 + rng.randrange(0, 2_000), lambda: self.write(call))
            self.at(250, lambda: self.answer(call, TransportError("timed out", maybe_sent=True)))

    def write_and_answer(self, call, back_ms: int, refuse: float = 0.0) -> None:
        answer = self.write(call, refuse)
        self.at(back_ms, lambda: self.answer(call, answer))

    def write(self, call, refuse: float = 0.0):
        if self.is_missing:
            return MISSING
        if self.is_auto:
            return PutRecordsResponse([self._write_anywhere(entry) for entry in call.entries])
        slots = []
        for entry in call.entries:
            shard_id = self.stream.owner(entry).shard_id
            if self.throttled and self.rng.random() < self.throttled:
                message = f"Rate exceeded for shard {shard_id} in stream s under account 123456789012."
                slots.append(PutRecordsResultEntry(error_code=THROTTLED, error_message=message))
            elif self.rng.random() < refuse:
                message = f"Rate exceeded for shard {shard_id} in stream s under account 123456789012."
                code, message = self.rng.choice(
                    [(THROTTLED, message), ("InternalFailure", "Internal service failure.")]
                )
                slots.append(PutRecordsResultEntry(error_code=code, error_message=message))
            else:
                slots.append(self.stream.write(entry))
        return PutRecordsResponse(slots, request_id="r")

    def _write_anywhere(self, entry) -> PutRecordsResultEntry:
        shard = self.rng.choice(self.stream.open_shards())
        self.stream.sequence_number += 1
        shard.log.append(Stored(self.stream.sequence_number, entry))
        return PutRecordsResultEntry(str(self.stream.sequence_number), shard.shard_id)

    def answer(self, call, answer) -> None:
        self.noticed |= answer is MISSING
        for bundle in call.bundles:
            for key in _keys(bundle):
                self.in_flight_keys[key] -= 1
        self.note(self.writer.on_response(call, answer, self.now_ms))
        self.step()

    def list_shards(self) -> None:
        troubled = self.rng.random() < self.listing_trouble
        wants_summary = self.writer.wants_summary

        def taken() -> None:
            nonlocal troubled
            troubled |= self.is_missing
            listing, created = self.stream.listing(), self.stream.created
            self.at(self.rng.randrange(1, 80), lambda: arrived(listing, created))

        def arrived(listing, created) -> None:
            if troubled:
                self.note(self.writer.on_listing_failed(TransportError("no listing"), self.now_ms))
            else:
                summary = None
                if wants_summary:
                    distribution = "AUTO" if self.is_auto else None
                    summary = StreamSummary(
                        name="s", arn="arn", status="ACTIVE", created_seconds=created, retention_hours=24,
                        open_shard_count=1, record_distribution=distribution,
                    )  # fmt: skip
                self.note(self.writer.on_listing(listing, summary, self.now_ms))
            self.step()

        self.at(self.rng.randrange(1, 80), taken)

    # time

    def step(self) -> None:
        steps = self.writer.tick(self.now_ms, self.now_ms)
        if steps.refresh:
            self.list_shards()
        for call in steps.calls:
            self.check_call(call)
            self.perform(call)
        self.note(steps)

    def note(self, steps) -> None:
        steps.events.clear()
        while steps.ended:
            bundle = steps.ended.popleft()
            if bundle.is_settled:
                for record in bundle.records:
                    self.outcomes.told(self.now_ms, record.put_result)
            bundle.release()

    def run(self, duration_ms: int = 4_000) -> None:
        rng = self.rng
        for _ in range(rng.randrange(5, 40)):
            self.at(rng.randrange(0, duration_ms), self.put_some)
        for _ in range(rng.randrange(0, 4)):
            self.at(rng.randrange(0, duration_ms), self.see_failures)
            self.at(rng.randrange(0, duration_ms), lambda: self.writer.flush(self.now_ms))
        if self.reshard_every_ms:
            for moment in range(0, duration_ms, self.reshard_every_ms):
                self.at(moment, self.reshard)
        if self.recreates:
            self.at(rng.randrange(0, duration_ms), self.delete)
        end_of_trouble = self.now_ms + duration_ms * 2
        for _ in range(200_000):
            deadline_ms = self.writer.tick_at_ms
            next_ms = self.agenda[0][0] if self.agenda else None
            if next_ms is None and deadline_ms is None:
                break
            if self.now_ms > end_of_trouble:
                self.trouble = self.listing_trouble = self.throttled = 0.0
            if next_ms is None or (deadline_ms is not None and deadline_ms < next_ms):
                assert deadline_ms is not None
                self.now_ms = max(self.now_ms, deadline_ms)
                self.step()
            else:
                self.now_ms, _, action = heapq.heappop(self.agenda)
                action()
                if self.writer.tick_at_ms == 0:
                    self.step()
        else:
            raise AssertionError("the writer never comes to rest")

    # the checkers

    def check_call(self, call) -> None:
        assert 1 <= len(call.entries) <= 500
        assert sum(len(entry.data) + len(entry.partition_key.encode()) for entry in call.entries) <= 10 << 20
        assert all(len(entry.data) <= 1 << 20 for entry in call.entries)
        for bundle in call.bundles:
            for key in _keys(bundle):
                self.in_flight_keys[key] += 1
                if self.rules.order == "key" and not self.is_auto:
                    assert self.in_flight_keys[key] == 1, f"two records of {key} in flight"

    def check(self) -> None:
        assert self.writer.is_idle, "something was never settled"
        if self.rules.delivery_timeout_ms == 60_000 and not self.recreates:
            # Faults end long before, so everything must be delivered.
            assert all(record.put_result.delivered for record in self.records), "a record failed without need"
        for data, sequence_number, index, shard_id in self.stream.copies():
            self.outcomes.read(data, shard_id, Position(sequence_number, index))
        self.outcomes.ended(self.now_ms)
        assert not self.outcomes.violations, self.outcomes.violations[0]


def _keys(bundle) -> list[str]:
    """Keys whose order is promised: an explicit hash key may select another shard."""
    return sorted({record.partition_key for record in bundle.records if record.explicit_hash_key is None})


def run_world(seed: int, **overrides) -> World:
    world = World(seed, **overrides)
    world.run()
    world.check()
    world.see_failures()  # records are not tracked by the garbage collector: unseen failures would never be freed
    return world


MISSING = StreamNotFoundError("no such stream", operation="PutRecords", code="ResourceNotFoundException")

"""Law: batches together are the stream, in order and whole, each within its limits, from wherever it is resumed."""

import random

from hypothesis import given, strategies as st

from anabranch._core.handling.batches import BatchLimits
from anabranch._model.leases import Checkpoint
from anabranch._model.streams import Position
from shard_owners import BatchOwner, Shard
from shard_records import places

KEYS = st.sampled_from("ab")
SHARDS = st.lists(KEYS | st.lists(KEYS, min_size=1, max_size=6), min_size=1, max_size=15).map(Shard)
LIMITS = st.builds(
    BatchLimits, max_records=st.integers(1, 5), max_bytes=st.integers(1, 30), max_wait_ms=st.integers(0, 5)
)


class Watched(BatchOwner):
    """Keeps every batch, or piece of one, that did not fail."""

    batches = ()

    def end(self):
        finished_count = len(self.finished)
        was_running = bool(self.running)
        super().end()
        if was_running and len(self.finished) == finished_count:
            self.batches = self.batches[:-1]

    def start(self):
        if not super().start():
            return False
        self.batches = (*self.batches, list(self.running))
        return True


@given(shard=SHARDS, limits=LIMITS, seed=st.integers(0, 2**32), resume=st.integers(0, 60))
def test_batches_are_the_rest_of_the_stream_in_order_and_within_their_limits(shard, limits, seed, resume):
    handled = min(resume, len(shard.records) - 1)
    watermark = shard.records[handled - 1].position if handled else None
    owner = Watched(shard, Checkpoint(watermark=watermark), "batch", random.Random(seed), limits)
    owner.work_to_the_end()
    assert [place for batch in owner.batches for place in places(batch)] == places(shard.records[handled:])
    assert owner.finished == shard.records[handled:]
    for batch in owner.batches:
        assert 1 <= len(batch) <= limits.max_records
        assert len(batch) == 1 or sum(len(record.data) for record in batch) <= limits.max_bytes
    assert owner.lane.checkpoint() == Checkpoint(watermark=shard.records[-1].position)
    assert owner.lane.finished_count == len(shard.records) - handled


@given(shard=SHARDS, limits=LIMITS, seed=st.integers(0, 2**32), step_count=st.integers(0, 60))
def test_the_watermark_is_the_last_finished_record_at_every_moment(shard, limits, seed, step_count):
    owner = BatchOwner(shard, Checkpoint(), "batch", random.Random(seed), limits)
    for _ in range(step_count):
        owner.step()
        finished = owner.finished[-1].position if owner.finished else None
        assert owner.lane.checkpoint().watermark == finished
        first = owner.lane.first_unfinished
        assert first is None or first.position > (finished or Position(-1))


@given(shard=SHARDS, limits=LIMITS, now_ms=st.integers(0, 100))
def test_a_batch_is_handed_out_when_its_first_record_has_waited_long_enough(shard, limits, now_ms):
    owner = BatchOwner(shard, Checkpoint(), "batch", random.Random(0), limits)
    owner.window.accept(owner.unread, None)
    lane = owner.lane
    if lane.next(now_ms, flush=False) is None:
        assert lane.next_deadline_ms == now_ms + limits.max_wait_ms
        assert lane.next(lane.next_deadline_ms - 1, flush=False) is None
        assert lane.next(lane.next_deadline_ms, flush=False) is not None

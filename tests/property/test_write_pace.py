"""The pace's law: in no stretch of time does a shard get more than a burst and its rate, and every record passes."""

import random

from hypothesis import given, strategies as st

from anabranch._core.writing.limiter import ShardPace
from anabranch.config import ProducerSettings
from anabranch.limits import MIB

waits_ms = st.integers(0, 500)
sizes = st.one_of(st.integers(1, 2_000), st.integers(1, 10 * MIB))


@given(st.lists(st.tuples(waits_ms, sizes, st.booleans()), max_size=60), st.floats(0.05, 1.0))
def test_no_stretch_has_more_than_a_burst_and_the_rate(steps, share):
    pace, entropy, now_ms = ShardPace(ProducerSettings(shard_share=share), 0), random.Random(1), 0
    taken: list[tuple[int, int]] = []
    for wait_ms, size_bytes, is_refused in steps:
        now_ms += wait_ms
        open_at_ms = pace.open_at_ms(size_bytes, now_ms)
        assert open_at_ms >= now_ms
        # A record waits for what the bucket lacks of it, and no longer than that takes at the lowest rate.
        assert open_at_ms - now_ms <= 2_001 + (20 * MIB + 2_000) / (share * 0.02 * MIB / 1_000)
        if open_at_ms == now_ms:
            pace.take(size_bytes)
            taken.append((now_ms, size_bytes))
            if is_refused:
                pace.on_refused(now_ms, entropy)
    for first in range(len(taken)):
        stretch = taken[first:]
        for last in range(1, len(stretch) + 1):
            seconds = (stretch[last - 1][0] - stretch[0][0]) / 1_000
            assert last - 1 <= max(1, share * 1_000) + seconds * share * 1_000 + 1e-6
            # The last record of a stretch may be larger than the bucket: it leaves a debt.
            before = sum(size for _, size in stretch[: last - 1])
            assert before <= share * 10 * MIB + seconds * share * MIB + 10 * MIB


@given(sizes, st.floats(0.05, 1.0), st.integers(0, 30))
def test_every_legal_record_passes_within_a_known_time(size_bytes, share, refusals):
    pace, entropy, now_ms = ShardPace(ProducerSettings(shard_share=share), 0), random.Random(1), 0
    for _ in range(refusals):
        pace.on_refused(now_ms, entropy)
        now_ms = pace.paused_until_ms
    for _ in range(200):
        open_at_ms = pace.open_at_ms(size_bytes, now_ms)
        if open_at_ms == now_ms:
            return
        now_ms = open_at_ms
    raise AssertionError("the record never passes")

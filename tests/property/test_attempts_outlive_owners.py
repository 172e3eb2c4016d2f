"""Law (rule M5): however owners follow each other, a record that has failed is never counted anew: who starts it knows
of every failed attempt that was committed.
"""

import random
from collections import Counter

from hypothesis import given, strategies as st

from anabranch._model.leases import Checkpoint
from shard_owners import Shard, make_owner
from shard_records import places

KEYS = st.sampled_from("abcd")
SHARDS = st.lists(KEYS | st.lists(KEYS, min_size=1, max_size=4), min_size=1, max_size=12).map(Shard)


def known_attempts(owner):
    """What the owner knows of the records that run, by their places."""
    if owner.order == "batch":
        begun = owner.running if len(owner.running) == 1 and not owner.done else []  # only a record alone has attempts
        return dict(zip(places(begun), [owner.lane.attempts], strict=False))
    return dict(zip(places(entry.record for entry in owner.running), [e.attempts for e in owner.running], strict=True))


@given(
    shard=SHARDS,
    order=st.sampled_from(["shard", "key", "batch", "none"]),
    lives=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**32)), min_size=2, max_size=6),
)
def test_every_failed_attempt_is_known_to_the_owners_that_follow(shard, order, lives):
    checkpoint, failed = Checkpoint(), Counter()
    for step_count, seed in lives:
        owner = make_owner(shard, checkpoint, order, random.Random(seed))
        before = failed.copy()
        for _ in range(step_count):
            owner.step()
            failed = before + Counter(places(owner.failed))
            for place, attempts in known_attempts(owner).items():
                assert attempts == failed[place]
        checkpoint = owner.commit()

"""Law (P1, P2, P3): in whatever order records are finished, and however owners follow each other, what they commit
never counts a record as finished that is not, counts all that is, and records are first started in the order of their
keys.
"""

import random

from hypothesis import given, strategies as st

from anabranch._core.tracker import adopt
from anabranch._model.leases import Checkpoint
from shard_owners import Shard, make_owner, says_finished
from shard_records import places

KEYS = st.sampled_from("abcd")
SHARDS = st.lists(KEYS | st.lists(KEYS, min_size=1, max_size=4), min_size=1, max_size=12).map(Shard)
ORDERED = st.sampled_from(["shard", "key", "batch"])
ANY = st.sampled_from(["shard", "key", "batch", "none"])


def chain(orders):
    """Owners that work for a number of steps and crash, each with a seed for what it does."""
    return st.lists(st.tuples(orders, st.integers(0, 60), st.integers(0, 2**32)), min_size=1, max_size=5)


def mode(order):
    return "shard" if order == "batch" else order


def live_through(shard, owners):
    """All owners in turn and a last one that works to the end; returns them with the checkpoint each resumed from."""
    checkpoint, lives, finished = Checkpoint(), [], set()
    for order, step_count, seed in [*owners, (owners[-1][0], None, 0)]:
        draw = random.Random(seed)
        owner = make_owner(shard, checkpoint, order, draw)
        relied_on = adopt(checkpoint, mode(order))
        lives.append((owner, relied_on))
        if step_count is None:
            owner.work_to_the_end()
            checkpoint = check_commit(shard, owner, relied_on, finished)
            continue
        for _ in range(step_count):
            owner.step()
            if draw.random() < 0.2:
                checkpoint = check_commit(shard, owner, relied_on, finished)
        finished |= set(places(owner.finished))
    return lives, checkpoint


def check_commit(shard, owner, relied_on, finished_before):
    committed = owner.commit()
    finished = finished_before | set(places(owner.finished))
    here = {tuple(r.position) for r in shard.records if says_finished(relied_on, r)} | set(places(owner.finished))
    counted = {tuple(record.position) for record in shard.records if says_finished(committed, record)}
    assert counted <= finished
    # With order "none" over an inherited map of keys the map cannot name single records: it may say less, never more.
    if owner.order != "none" or committed.order == "none":
        assert counted >= here
    assert relied_on.watermark is None or committed.watermark >= relied_on.watermark
    assert len({entry.digest for entry in committed.open_keys}) == len(committed.open_keys)
    return committed


@given(shard=SHARDS, owners=chain(ANY))
def test_a_checkpoint_counts_what_is_finished_and_nothing_else(shard, owners):
    lives, last = live_through(shard, owners)
    handled = {place for owner, _ in lives for place in places(owner.finished)}
    assert handled == set(places(shard.records))
    assert last.watermark == shard.records[-1].position
    assert (last.frontier, last.open_keys) == (None, ())


@given(shard=SHARDS, owners=chain(ANY))
def test_an_owner_starts_nothing_that_its_checkpoint_counts_as_finished(shard, owners):
    lives, _ = live_through(shard, owners)
    for owner, relied_on in lives:
        assert [record for record in owner.started if says_finished(relied_on, record)] == []


@given(shard=SHARDS, owners=chain(ORDERED))
def test_the_records_of_a_key_are_first_started_in_stream_order(shard, owners):
    lives, _ = live_through(shard, owners)
    firsts = list(dict.fromkeys(place for owner, _ in lives for place in places(owner.started)))
    key_of = {tuple(record.position): record.partition_key for record in shard.records}
    for key in "abcd":
        assert [p for p in firsts if key_of[p] == key] == [p for p in key_of if key_of[p] == key]


@given(shard=SHARDS, orders=st.lists(ANY, min_size=2, max_size=5), seed=st.integers(0, 2**32))
def test_a_change_of_order_between_owners_costs_repeats_at_most(shard, orders, seed):
    """Rule M5: a map written without order is dropped by who keeps order, every other one is kept."""
    lives, _ = live_through(shard, [(order, 30, seed + n) for n, order in enumerate(orders)])
    for (owner, relied_on), order in zip(lives, [*orders, orders[-1]], strict=True):
        if relied_on.order == "none":
            assert order == "none"
        for key in "abcd" if order != "none" else "":
            started = places(record for record in owner.started if record.partition_key == key)
            assert list(dict.fromkeys(started)) == sorted(set(started))

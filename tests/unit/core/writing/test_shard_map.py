import random

import pytest
from stream_of_shards import HIGHEST, MIDDLE, listing, shard, shard_id

from anabranch._core.writing.shard_map import MappedShard, ShardMap, digest_of_hash_key
from anabranch._model.hash_keys import md5_hash_key


def ready_map(shards, now_ms=1_000):
    shard_map = ShardMap(entropy=random.Random(1))
    shard_map.begin(now_ms)
    shard_map.install(shards, now_ms)
    return shard_map


def at(hash_key):
    return digest_of_hash_key(hash_key)


def predicted(shard_map, hash_key):
    found = shard_map.predict(at(hash_key))
    return None if found is None else found.shard_id


HALVES = [shard(1, 0, MIDDLE - 1, starts=5), shard(2, MIDDLE, HIGHEST, starts=5)]


def test_nothing_is_predicted_while_nothing_is_known():
    shard_map = ShardMap(entropy=random.Random(1))
    assert shard_map.state == "invalid"
    assert shard_map.wants_refresh(0)
    assert predicted(shard_map, 0) is None


def test_a_listing_makes_it_ready_and_every_key_has_its_shard():
    shard_map = ready_map(listing(4))
    assert shard_map.state == "ready"
    assert not shard_map.wants_refresh(10_000_000)
    assert shard_map.next_deadline_ms is None
    for hash_key in (0, MIDDLE - 1, MIDDLE, HIGHEST, md5_hash_key("user-123")):
        owner = next(s for s in listing(4) if hash_key in s.hash_key_range)
        assert predicted(shard_map, hash_key) == owner.shard_id


def test_a_refresh_takes_no_answer_away():
    shard_map = ready_map(listing(2))
    shard_map.request_refresh()
    assert shard_map.state == "invalid"
    assert predicted(shard_map, 0) == shard_id(0)
    shard_map.begin(2_000)
    assert shard_map.state == "updating"
    shard_map.request_refresh()
    assert shard_map.state == "updating"
    assert predicted(shard_map, HIGHEST) == shard_id(1)


def test_backoff_grows_from_one_second_to_thirty_and_a_listing_ends_it():
    shard_map = ShardMap(entropy=random.Random(3))
    now_ms, delays = 0, []
    for _ in range(12):
        assert shard_map.wants_refresh(now_ms)
        shard_map.begin(now_ms)
        assert not shard_map.wants_refresh(now_ms)
        shard_map.fail(now_ms)
        assert not shard_map.wants_refresh(now_ms)
        delays.append(shard_map.next_deadline_ms - now_ms)
        now_ms = shard_map.next_deadline_ms
    assert 1_000 <= delays[0] <= 2_000
    assert all(1_000 <= delay <= 30_000 for delay in delays)
    assert max(delays[6:]) > 5_000
    shard_map.begin(now_ms)
    shard_map.install(listing(1), now_ms)
    shard_map.request_refresh()
    assert shard_map.wants_refresh(now_ms)


def test_a_response_for_a_shard_that_the_listing_no_longer_has_teaches_nothing():
    shard_map = ready_map(listing(1))
    old = shard_map.predict(at(0))
    shard_map.request_refresh()
    shard_map.begin(2_000)
    shard_map.install(HALVES, 2_010)
    shard_map.learn(old, at(0), shard_id(7), 3_000)
    assert shard_map.state == "ready"


def test_what_a_response_disproves_is_not_predicted_any_more_and_the_rest_is():
    shard_map = ready_map(listing(2))
    first = shard_map.predict(at(0))
    generation = shard_map.generation
    shard_map.learn(first, at(0), shard_id(7), 2_000)
    assert shard_map.state == "invalid"
    assert predicted(shard_map, 0) is None
    assert predicted(shard_map, HIGHEST) == shard_id(1)
    assert shard_map.generation > generation
    assert shard_map.find(first.shard_id, 2_001) == first


def test_a_response_that_confirms_teaches_nothing():
    shard_map = ready_map(listing(2))
    first = shard_map.predict(at(0))
    shard_map.learn(first, at(0), first.shard_id, 2_000)
    assert shard_map.state == "ready"


def test_a_response_older_than_the_listing_teaches_nothing():
    shard_map = ready_map(listing(2), now_ms=2_000)
    first = shard_map.predict(at(0))
    shard_map.learn(first, at(0), shard_id(7), 2_000)
    assert (shard_map.state, predicted(shard_map, 0)) == ("ready", shard_id(0))
    shard_map.learn(first, at(0), shard_id(7), 2_001)
    assert (shard_map.state, predicted(shard_map, 0)) == ("invalid", None)


def test_a_parent_that_is_still_written_to_after_its_split_disproves_nothing():
    shard_map = ready_map(listing(1))
    shard_map.request_refresh()
    shard_map.begin(2_000)
    shard_map.install(HALVES, 2_010)
    child = shard_map.predict(at(0))
    shard_map.learn(child, at(0), shard_id(0), 2_500)
    assert shard_map.state == "ready"


def test_closed_shards_are_remembered_for_a_minute():
    shard_map = ready_map(listing(1))
    shard_map.request_refresh()
    shard_map.begin(2_000)
    shard_map.install(HALVES, 2_000)
    assert shard_map.find(shard_id(0), 61_999).shard_id == shard_id(0)
    assert shard_map.find(shard_id(0), 62_000) is None
    shard_map.request_refresh()
    shard_map.begin(70_000)
    shard_map.install([HALVES[0], shard(3, MIDDLE, HIGHEST, starts=9)], 70_000)
    assert shard_id(0) not in shard_map._closed


def test_a_listing_from_two_instants_keeps_the_younger_shards_and_is_asked_for_again():
    shard_map = ready_map([shard(0), HALVES[0]])
    assert [s.shard_id for s in shard_map.shards] == [shard_id(1)]
    assert predicted(shard_map, HIGHEST) is None
    assert shard_map.state == "invalid"
    assert shard_map.next_deadline_ms >= 2_000


def test_a_listing_with_both_parents_beside_their_child_keeps_the_child():
    parents = [shard(0, 0, MIDDLE - 1), shard(1, MIDDLE, HIGHEST)]
    shard_map = ready_map([*parents, shard(2, 0, HIGHEST, starts=9)])
    assert [s.shard_id for s in shard_map.shards] == [shard_id(2)]
    assert shard_map.state == "ready"


def test_closed_shards_in_a_listing_are_left_out():
    shard_map = ready_map([shard(0, ends=99), *HALVES])
    assert [s.shard_id for s in shard_map.shards] == [shard_id(1), shard_id(2)]


def test_a_listing_with_a_gap_in_the_middle_is_asked_for_again():
    shard_map = ready_map([shard(0, 0, 9), shard(1, 11, HIGHEST)])
    assert predicted(shard_map, 10) is None
    assert shard_map.state == "invalid"


@pytest.mark.parametrize(
    "before, after",
    [
        ([shard(0, starts=1)], [shard(0, starts=50)]),  # the same name, begun at another place
        ([shard(8, starts=9)], [shard(0, starts=50)]),  # names count from the beginning again
        (HALVES, [shard(0, starts=50)]),
    ],
)
def test_a_stream_created_again_is_noticed(before, after):
    shard_map = ready_map(before)
    shard_map.request_refresh()
    shard_map.begin(2_000)
    assert shard_map.install(after, 2_000)
    assert shard_map.predict(at(0)) == MappedShard.of(after[0])
    assert shard_map.find(shard_id(8), 2_001) is None


def test_a_closed_shard_that_returns_begun_elsewhere_is_another_stream():
    shard_map = ready_map(listing(1))
    shard_map.request_refresh()
    shard_map.begin(2_000)
    assert not shard_map.install(HALVES, 2_000)
    shard_map.request_refresh()
    shard_map.begin(3_000)
    assert shard_map.install([shard(0, starts=77), *HALVES], 3_000)


def test_the_same_listing_again_changes_nothing():
    shard_map = ready_map(listing(3))
    shards, generation = list(shard_map.shards), shard_map.generation
    shard_map.request_refresh()
    shard_map.begin(2_000)
    assert not shard_map.install(listing(3), 2_000)
    assert shard_map.generation == generation
    assert all(new is old for new, old in zip(shard_map.shards, shards, strict=True))


def test_an_unchanged_shard_stays_the_same_object_through_a_reshard():
    shard_map = ready_map([HALVES[0], HALVES[1]])
    kept = shard_map.predict(at(0))
    shard_map.request_refresh()
    shard_map.begin(2_000)
    shard_map.install([HALVES[0], shard(3, MIDDLE, MIDDLE + 9, 8), shard(4, MIDDLE + 10, HIGHEST, 8)], 2_000)
    assert shard_map.predict(at(0)) is kept


def test_a_map_that_was_not_confirmed_for_a_minute_is_stale():
    shard_map = ready_map(listing(1), now_ms=1_000)
    assert not shard_map.is_stale(61_000)
    assert shard_map.is_stale(61_001)
    shard_map.confirm(61_001)
    assert not shard_map.is_stale(61_001)
    shard_map.clear()
    assert shard_map.state == "invalid"
    assert predicted(shard_map, 0) is None
    assert not shard_map.is_stale(10_000_000)


def test_an_empty_listing_predicts_nothing():
    shard_map = ready_map([])
    assert predicted(shard_map, 0) is None
    assert shard_map.state == "invalid"


def test_moves_that_make_no_sense_are_errors():
    shard_map = ready_map(listing(1))
    with pytest.raises(KeyError):
        shard_map.install(listing(1), 3_000)
    with pytest.raises(KeyError):
        shard_map.begin(3_000)

"""From which time on a shard is still to be read, by the rows of the shards before it."""

from anabranch._core.shards.graph import ShardGraph, opened_after_horizon, unread_since
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow
from anabranch._model.streams import Shard


def lease(number, start, end, seen_through=None, waits_for=()):
    return LeaseRow(
        key=LeaseKey("s", 0, name(number)),
        hash_key_range=HashKeyRange(start, end),
        waits_for=waits_for,
        finish=Finish("end"),
        checkpoint=Checkpoint(seen_through_seconds=seen_through),
    )


def shard(number, start, end, *parents):
    return Shard(
        shard_id=name(number),
        hash_key_range=HashKeyRange(start, end),
        starting_sequence_number=1,
        parent_shard_id=name(parents[0]) if parents else None,
        adjacent_parent_shard_id=name(parents[1]) if len(parents) > 1 else None,
    )


def name(number):
    return f"shardId-{number:012}"


def since(listed, rows, *, made=()):
    """Of the shard that is listed last."""
    graph = ShardGraph().extended(shards=listed, rows=rows)
    with_rows = [row.key.shard_id for row in rows] + [name(number) for number in made]
    return unread_since(graph, listed[-1].shard_id, rows, with_rows)


def test_a_merged_shard_is_unread_since_the_later_of_its_parents_was_read():
    """Each has told of its own losses, and none has anything that the child has."""
    assert since([shard(2, 0, 9, 0, 1)], [lease(0, 0, 4, 100.0), lease(1, 5, 9, 900.0)]) == 900.0
    assert since([shard(2, 0, 9, 0, 1)], [lease(0, 0, 4), lease(1, 5, 9, 900.0)]) == 900.0


def test_a_parent_whose_row_is_created_first_reports_its_own_losses():
    listed = [shard(2, 0, 4, 0), shard(3, 0, 9, 1, 2)]
    rows = [lease(0, 0, 4, 100.0), lease(1, 5, 9, 900.0)]
    assert since(listed, rows) == 100.0
    assert since(listed, rows, made=[2]) == 900.0


def test_a_shard_after_an_unseen_one_is_unread_since_the_shards_before_that_were_read():
    """3 came of 0 and 1, was merged with 2 into 4, and was trimmed before it had a row."""
    rows = [lease(0, 0, 4, 100.0), lease(1, 5, 9, 200.0), lease(2, 10, 19, 900.0)]
    assert since([shard(4, 0, 19, 3, 2)], rows) == 100.0


def test_of_several_rows_with_the_same_keys_the_latest_counts():
    rows = [lease(0, 0, 19, 50.0), lease(1, 0, 9, 100.0), lease(2, 10, 19, 80.0)]
    assert since([shard(4, 0, 19, 3)], rows) == 80.0
    assert since([shard(4, 0, 9, 3)], rows) == 100.0


def test_the_time_is_unknown_if_a_relevant_row_does_not_have_it():
    assert since([shard(4, 0, 19, 3)], [lease(0, 0, 9, 100.0), lease(1, 10, 19)]) is None


def test_keys_that_no_row_has_were_never_read_and_nothing_was_promised_of_them():
    assert since([shard(4, 0, 19, 3)], [lease(0, 0, 9, 100.0)]) == 100.0
    assert since([shard(4, 0, 19, 3)], []) is None


def test_a_shard_with_unknown_hash_keys_has_an_unknown_unread_time():
    assert unread_since(ShardGraph(), name(1), [lease(0, 0, 9, 100.0)], [name(0)]) is None


def test_what_a_row_was_made_to_wait_for_is_no_parent_by_that_alone():
    rows = [
        lease(0, 0, 9, 100.0),
        lease(2, 10, 19, 900.0),
        lease(4, 0, 19, waits_for=(name(0), name(2))),
    ]
    assert since([shard(4, 0, 19, 3, 2)], rows) == 100.0


def test_rows_of_shards_that_came_later_say_nothing():
    rows = [lease(0, 0, 19, 100.0), lease(7, 0, 9, 900.0)]
    assert since([shard(4, 0, 19, 0)], rows) == 100.0


def test_a_shard_opened_after_the_horizon_if_ancestors_with_all_its_keys_were_open_there():
    """0 and 1 were merged into 2, which was split into 3 and 4."""
    listed = [shard(0, 0, 4), shard(1, 5, 9), shard(2, 0, 9, 0, 1), shard(3, 0, 4, 2), shard(4, 5, 9, 2)]
    graph = ShardGraph().extended(shards=listed)

    def opened_after(number, *open_at_horizon, with_rows=(0, 1, 2)):
        names = [name(other) for other in open_at_horizon]
        return opened_after_horizon(graph, name(number), names, [name(other) for other in with_rows])

    assert opened_after(3, 2)
    assert opened_after(3, 0, 1)
    assert opened_after(2, 0, 1)
    assert not opened_after(2, 0)  # 1 may have been trimmed before anybody read it
    assert not opened_after(2, 0, 1, with_rows=(0,))
    assert not opened_after(2, 2)
    assert not opened_after(2, 3, 4)  # it closed before
    assert not opened_after(3)
    assert not opened_after(9, 0, 1)

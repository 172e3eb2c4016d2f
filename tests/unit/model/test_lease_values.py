"""The small rules that lease rows, start positions and filters carry themselves."""

import msgspec

from anabranch._model import streams
from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow
from anabranch._model.streams import AT_LATEST, TRIM_HORIZON, ShardFilter, StartingPosition

ROW = LeaseRow(key=LeaseKey("1:orders:1", 2, "shardId-000000000000"), epoch=7)


def test_a_lease_is_finished_when_it_says_how():
    assert not ROW.is_finished
    assert msgspec.structs.replace(ROW, finish=Finish("end")).is_finished


def test_the_fence_token_grows_with_generation_first_and_epoch_then():
    tokens = [
        LeaseRow(key=LeaseKey("s", generation, "shard"), epoch=epoch).fence_token
        for generation, epoch in [(0, 0), (0, 1), (0, 2**32 - 1), (1, 0), (2, 7)]
    ]
    assert tokens == sorted(set(tokens))
    assert ROW.fence_token == (2 << 32) + 7


def test_a_new_lease_is_read_from_the_beginning_of_its_shard():
    assert ROW.start == TRIM_HORIZON
    assert ROW.checkpoint == Checkpoint()


def test_starting_positions_use_aws_names():
    assert streams.at_sequence_number(5) == StartingPosition("AT_SEQUENCE_NUMBER", "5")
    assert streams.after_sequence_number("5") == StartingPosition("AFTER_SEQUENCE_NUMBER", "5")
    assert streams.at_timestamp(1.5) == StartingPosition("AT_TIMESTAMP", None, 1.5)


def test_filters_are_values():
    assert ShardFilter("AT_LATEST") == AT_LATEST
    assert ShardFilter("FROM_TIMESTAMP", timestamp_seconds=2.0).timestamp_seconds == 2.0

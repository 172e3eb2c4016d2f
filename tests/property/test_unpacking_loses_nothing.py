"""Law (M2, F6): over any mix of plain and aggregated records and any place to resume from, every record comes out once,
in order, and what is marked or left out is what the policy says.
"""

from hypothesis import given, strategies as st

from anabranch._core.reading.window import Unpacker
from anabranch._model.hash_keys import HashKeyRange, md5_hash_key
from anabranch._model.streams import Position
from anabranch._wire.aggregate import PRODUCER_TAG
from anabranch.limits import HASH_KEY_MAX
from shard_records import SHARD, STREAM, aggregated, places, plain

KEYS = st.sampled_from([f"key {n}" for n in range(8)])
SUBS = st.tuples(KEYS, st.binary(max_size=3)) | st.tuples(KEYS, st.binary(max_size=3), st.sampled_from(["0", "9" * 38]))
AGGREGATES = st.tuples(st.lists(SUBS, min_size=1, max_size=5), st.booleans())
UNITS = st.lists(KEYS | AGGREGATES, max_size=10)
RANGES = st.none() | st.integers(0, HASH_KEY_MAX).map(lambda end: HashKeyRange(0, end))
POSITIONS = st.none() | st.builds(Position, st.integers(0, 11), st.integers(-1, 5) | st.just(1 << 62))
POLICIES = st.sampled_from(["by_writer", "deliver", "skip"])


def read_of(units):
    return [
        plain(number, unit)
        if isinstance(unit, str)
        else aggregated(number, *unit[0], tags=(PRODUCER_TAG,) if unit[1] else ())
        for number, unit in enumerate(units, 1)
    ]


def expected(units, after, shard, policy):
    """Place, partition key, misrouted: from the rules, record by record."""
    for number, unit in enumerate(units, 1):
        if isinstance(unit, str):
            if after is None or Position(number) > after:
                yield (number, -1), unit, False
            continue
        subs, marked = unit
        hash_keys = [md5_hash_key(sub[0]) if len(sub) == 2 else int(sub[2]) for sub in subs]
        strays = [shard is not None and hash_key not in shard for hash_key in hash_keys]
        if any(strays) and (policy == "skip" or (policy == "by_writer" and marked)):
            continue
        for index, sub in enumerate(subs):
            if after is None or Position(number, index) > after:
                yield (number, index), sub[0], strays[index]


@given(units=UNITS, after=POSITIONS, shard=RANGES, policy=POLICIES)
def test_every_record_after_the_position_comes_out_once_and_in_order(units, after, shard, policy):
    unpacker = Unpacker(STREAM, SHARD, shard, policy)
    stretches = [some.records for some in unpacker.unpack(read_of(units), after)]
    assert all(stretches)
    records = [record for stretch in stretches for record in stretch]
    found = list(zip(places(records), (r.partition_key for r in records), (r.misrouted for r in records), strict=True))
    assert found == list(expected(units, after, shard, policy))
    assert unpacker.take_counts()[0] == sum(record.misrouted for record in records)


@given(units=UNITS, cut=st.integers(0, 40))
def test_resuming_after_any_record_gives_exactly_the_rest(units, cut):
    read = read_of(units)
    whole = [r for some in Unpacker(STREAM, SHARD, None).unpack(read, None) for r in some.records]
    cut = min(cut, len(whole))
    after = whole[cut - 1].position if cut else None
    # Iterators resume at whole Kinesis records: what was handled of the first one comes again.
    again = [r for r in read if after is None or int(r.sequence_number) >= after.sequence_number]
    rest = [r for some in Unpacker(STREAM, SHARD, None).unpack(again, after) for r in some.records]
    assert whole[:cut] + rest == whole

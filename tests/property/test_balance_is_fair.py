"""The laws of the balance, over random fleets."""

from hypothesis import given, strategies as st
from msgspec.structs import replace

from anabranch._core.leases.plan import LeaseDemand, balance
from anabranch._model.leases import LeaseKey

MEMBERS = [f"m{number}" for number in range(7)]


@st.composite
def fleets(draw, *, limits=True, cooling=True):
    present = draw(st.lists(st.sampled_from(MEMBERS), unique=True, max_size=6))
    members = {member_id: draw(st.none() | st.integers(0, 6)) if limits else None for member_id in present}
    demands = [
        LeaseDemand(
            LeaseKey("1:orders:1", 0, f"shardId-{number:012}"),
            draw(st.none() | st.sampled_from(MEMBERS)),
            draw(st.sampled_from([1, 1, 1, 0])),
            draw(st.sampled_from([True, True, False])) if cooling else True,
            takers=tuple(MEMBERS),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    return members, demands


def loads(members, demands, desired):
    counts = dict.fromkeys(members, 0)
    for demand in demands:
        if desired.get(demand.key) in counts:
            counts[desired[demand.key]] += demand.weight
    return counts


@given(fleets(limits=False, cooling=False))
def test_members_differ_by_at_most_one(fleet):
    members, demands = fleet
    counts = loads(members, demands, balance(members, demands))
    if counts:
        assert max(counts.values()) - min(counts.values()) <= 1
        assert sum(counts.values()) == sum(demand.weight for demand in demands)


@given(fleets(cooling=False))
def test_a_member_with_room_is_at_most_one_behind_another(fleet):
    members, demands = fleet
    counts = loads(members, demands, balance(members, demands))
    owned = {name: sum(demand.weight for demand in demands if demand.owner == name) for name in members}
    for name, count in counts.items():
        limit = members[name]
        # A member above its limit is never stripped of what nobody else has room for.
        assert limit is None or count <= max(limit, owned[name])
        if limit is None or count < limit:
            assert all(other <= count + 1 for other_name, other in counts.items() if members[other_name] != other)


@given(fleets())
def test_what_was_decided_is_decided_again(fleet):
    members, demands = fleet
    desired = balance(members, demands)
    settled = [replace(demand, owner=desired.get(demand.key)) for demand in demands if demand.key in desired]
    if all(demand.owner in members for demand in settled):
        assert balance(members, settled) == desired


@given(fleets(limits=False, cooling=False))
def test_a_lease_leaves_a_member_only_if_that_has_more_than_its_share(fleet):
    members, demands = fleet
    if not members:
        return
    desired = balance(members, demands)
    total = sum(demand.weight for demand in demands)
    fewest = total // len(members)
    for member in members:
        mine = [demand for demand in demands if demand.owner == member and demand.weight]
        left = [demand for demand in mine if desired[demand.key] != member]
        if left:
            assert len(mine) > fewest
            assert len(mine) - len(left) >= fewest


@given(fleets(limits=False, cooling=False))
def test_no_fair_sharing_moves_less(fleet):
    members, demands = fleet
    if not members:
        return
    desired = balance(members, demands)
    owned = sorted((sum(c.weight for c in demands if c.owner == member) for member in members), reverse=True)
    share, over = divmod(sum(demand.weight for demand in demands), len(members))
    kept_at_best = sum(min(count, share + (place < over)) for place, count in enumerate(owned))
    kept = sum(demand.weight for demand in demands if demand.owner and desired.get(demand.key) == demand.owner)
    assert kept >= kept_at_best


@given(fleets(), st.randoms())
def test_the_order_of_the_inputs_does_not_matter(fleet, random):
    members, demands = fleet
    expected = balance(members, demands)
    members = dict(random.sample(list(members.items()), len(members)))
    random.shuffle(demands)
    assert balance(members, demands) == expected


@given(fleets())
def test_leases_that_must_not_move_stay(fleet):
    members, demands = fleet
    desired = balance(members, demands)
    for demand in demands:
        if demand.owner in members and (demand.weight == 0 or not demand.movable):
            assert desired[demand.key] == demand.owner


@given(fleets())
def test_only_members_that_are_present_get_something_new(fleet):
    members, demands = fleet
    desired = balance(members, demands)
    for demand in demands:
        if demand.key in desired and desired[demand.key] != demand.owner:
            assert desired[demand.key] in members


def test_children_stay_with_their_parents_holder_while_that_is_fair():
    keys = [LeaseKey("1:orders:1", 0, f"shardId-{number:012}") for number in range(4)]
    members, takers = {"a": None, "b": None}, ("a", "b")
    adopted = [LeaseDemand(key, owner, takers=takers) for key, owner in zip(keys, "abb", strict=False)]
    assert balance(members, adopted) == {keys[0]: "a", keys[1]: "b", keys[2]: "b"}
    unfair = [LeaseDemand(key, "b", takers=takers) for key in keys]
    assert sorted(balance(members, unfair).values()) == ["a", "a", "b", "b"]


def test_without_seats_everything_stays_where_it_is():
    key = LeaseKey("1:orders:1", 0, "shardId-000000000000")
    assert balance({}, [LeaseDemand(key, "draining"), LeaseDemand(replace(key, shard_id="x"))]) == {key: "draining"}


@st.composite
def fleets_of_two_streams(draw):
    """Some members read only one of two streams, as while another is added worker by worker."""
    present = draw(st.lists(st.sampled_from(MEMBERS), unique=True, min_size=1, max_size=6))
    readers = {stream: sorted(draw(st.lists(st.sampled_from(present), unique=True))) for stream in ("a", "b")}
    demands = [
        LeaseDemand(
            LeaseKey(stream, 0, f"shardId-{number:012}"),
            draw(st.none() | st.sampled_from(readers[stream])) if readers[stream] else None,
            takers=tuple(readers[stream]),
        )
        for number in range(draw(st.integers(0, 12)))
        for stream in [draw(st.sampled_from(["a", "b"]))]
    ]
    return dict.fromkeys(present), demands, readers


@given(fleets_of_two_streams())
def test_each_member_gets_leases_of_streams_that_it_reads_and_none_is_left(fleet):
    members, demands, readers = fleet
    desired = balance(members, demands)
    for demand in demands:
        takers = readers[demand.key.stream_key]
        assert desired.get(demand.key) in takers if takers else demand.key not in desired


@given(fleets_of_two_streams())
def test_no_reader_of_a_stream_could_relieve_another_that_has_two_more(fleet):
    members, demands, readers = fleet
    desired = balance(members, demands)
    counts = loads(members, demands, desired)
    both = set(readers["a"]) & set(readers["b"])
    for demand in demands:
        if (owner := desired.get(demand.key)) is None:
            continue
        # Who reads one stream only is as full as the others can make it.
        relief = both if owner in both else set(readers[demand.key.stream_key]) - both
        assert all(counts[other] >= counts[owner] - 1 for other in relief)


@given(fleets_of_two_streams())
def test_what_was_decided_for_two_streams_is_decided_again(fleet):
    members, demands, _ = fleet
    desired = balance(members, demands)
    settled = [replace(demand, owner=desired[demand.key]) for demand in demands if demand.key in desired]
    assert balance(members, settled) == desired


def test_a_member_with_shards_of_another_stream_keeps_the_remainder_that_it_was_given():
    keys = [LeaseKey("a", 0, f"shardId-{number}") for number in range(3)]
    members = {"m0": None, "m1": None}
    only_m0 = [LeaseDemand(LeaseKey("b", 0, f"shardId-{number}"), takers=("m0",)) for number in (3, 4)]
    demands = [LeaseDemand(key, takers=("m0", "m1")) for key in keys] + only_m0
    desired = balance(members, demands)
    assert balance(members, [replace(demand, owner=desired[demand.key]) for demand in demands]) == desired

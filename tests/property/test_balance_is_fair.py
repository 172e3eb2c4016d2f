"""The laws of the balance, over random fleets."""

from hypothesis import given, strategies as st
from msgspec.structs import replace

from anabranch._core.leases.balance import LeaseDemand, MemberCapacity, balance
from anabranch._model.leases import LeaseKey

MEMBERS = [f"m{number}" for number in range(7)]


@st.composite
def fleets(draw, *, limits=True, cooling=True):
    present = draw(st.lists(st.sampled_from(MEMBERS), unique=True, max_size=6))
    seats = [
        MemberCapacity(member_id, draw(st.none() | st.integers(0, 6)) if limits else None) for member_id in present
    ]
    claims = [
        LeaseDemand(
            LeaseKey("1:orders:1", 0, f"shardId-{number:012}"),
            draw(st.none() | st.sampled_from(MEMBERS)),
            draw(st.sampled_from([1, 1, 1, 0])),
            draw(st.sampled_from([True, True, False])) if cooling else True,
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    return seats, claims


def loads(seats, claims, desired):
    counts = {seat.member_id: 0 for seat in seats}
    for claim in claims:
        if desired.get(claim.key) in counts:
            counts[desired[claim.key]] += claim.weight
    return counts


@given(fleets(limits=False, cooling=False))
def test_members_differ_by_at_most_one(fleet):
    seats, claims = fleet
    counts = loads(seats, claims, balance(seats, claims))
    if counts:
        assert max(counts.values()) - min(counts.values()) <= 1
        assert sum(counts.values()) == sum(claim.weight for claim in claims)


@given(fleets(cooling=False))
def test_a_member_with_room_is_at_most_one_behind_another(fleet):
    seats, claims = fleet
    counts = loads(seats, claims, balance(seats, claims))
    limits = {seat.member_id: seat.shards_max for seat in seats}
    owned = {seat.member_id: sum(claim.weight for claim in claims if claim.owner == seat.member_id) for seat in seats}
    for name, count in counts.items():
        limit = limits[name]
        # A member above its limit is never stripped of what nobody else has room for.
        assert limit is None or count <= max(limit, owned[name])
        if limit is None or count < limit:
            assert all(other <= count + 1 for other_name, other in counts.items() if limits[other_name] != other)


@given(fleets())
def test_what_was_decided_is_decided_again(fleet):
    seats, claims = fleet
    desired = balance(seats, claims)
    settled = [replace(claim, owner=desired.get(claim.key)) for claim in claims if claim.key in desired]
    seated = {seat.member_id for seat in seats}
    if all(claim.owner in seated for claim in settled):
        assert balance(seats, settled) == desired


@given(fleets(limits=False, cooling=False))
def test_a_lease_leaves_a_member_only_if_that_has_more_than_its_share(fleet):
    seats, claims = fleet
    if not seats:
        return
    desired = balance(seats, claims)
    total = sum(claim.weight for claim in claims)
    fewest = total // len(seats)
    for seat in seats:
        mine = [claim for claim in claims if claim.owner == seat.member_id and claim.weight]
        left = [claim for claim in mine if desired[claim.key] != seat.member_id]
        if left:
            assert len(mine) > fewest
            assert len(mine) - len(left) >= fewest


@given(fleets(limits=False, cooling=False))
def test_no_fair_sharing_moves_less(fleet):
    seats, claims = fleet
    if not seats:
        return
    desired = balance(seats, claims)
    owned = sorted((sum(c.weight for c in claims if c.owner == seat.member_id) for seat in seats), reverse=True)
    share, over = divmod(sum(claim.weight for claim in claims), len(seats))
    kept_at_best = sum(min(count, share + (place < over)) for place, count in enumerate(owned))
    kept = sum(claim.weight for claim in claims if claim.owner and desired.get(claim.key) == claim.owner)
    assert kept >= kept_at_best


@given(fleets(), st.randoms())
def test_the_order_of_the_inputs_does_not_matter(fleet, random):
    seats, claims = fleet
    expected = balance(seats, claims)
    random.shuffle(seats)
    random.shuffle(claims)
    assert balance(seats, claims) == expected


@given(fleets())
def test_leases_that_must_not_move_stay(fleet):
    seats, claims = fleet
    desired = balance(seats, claims)
    seated = {seat.member_id for seat in seats}
    for claim in claims:
        if claim.owner in seated and (claim.weight == 0 or not claim.movable):
            assert desired[claim.key] == claim.owner


@given(fleets())
def test_only_members_with_a_seat_get_something_new(fleet):
    seats, claims = fleet
    seated = {seat.member_id for seat in seats}
    desired = balance(seats, claims)
    for claim in claims:
        if claim.key in desired and desired[claim.key] != claim.owner:
            assert desired[claim.key] in seated


def test_children_stay_with_their_parents_holder_while_that_is_fair():
    keys = [LeaseKey("1:orders:1", 0, f"shardId-{number:012}") for number in range(4)]
    seats = [MemberCapacity("a"), MemberCapacity("b")]
    adopted = [LeaseDemand(keys[0], "a"), LeaseDemand(keys[1], "b"), LeaseDemand(keys[2], "b")]
    assert balance(seats, adopted) == {keys[0]: "a", keys[1]: "b", keys[2]: "b"}
    unfair = [LeaseDemand(key, "b") for key in keys]
    assert sorted(balance(seats, unfair).values()) == ["a", "a", "b", "b"]


def test_without_seats_everything_stays_where_it_is():
    key = LeaseKey("1:orders:1", 0, "shardId-000000000000")
    assert balance([], [LeaseDemand(key, "draining"), LeaseDemand(replace(key, shard_id="x"))]) == {key: "draining"}


@st.composite
def fleets_of_two_streams(draw):
    """Some members read only one of two streams, as while another is added worker by worker."""
    present = draw(st.lists(st.sampled_from(MEMBERS), unique=True, min_size=1, max_size=6))
    readers = {stream: sorted(draw(st.lists(st.sampled_from(present), unique=True))) for stream in ("a", "b")}
    claims = [
        LeaseDemand(
            LeaseKey(stream, 0, f"shardId-{number:012}"),
            draw(st.none() | st.sampled_from(readers[stream])) if readers[stream] else None,
            takers=tuple(readers[stream]),
        )
        for number in range(draw(st.integers(0, 12)))
        for stream in [draw(st.sampled_from(["a", "b"]))]
    ]
    return [MemberCapacity(member_id) for member_id in present], claims, readers


@given(fleets_of_two_streams())
def test_each_member_gets_leases_of_streams_that_it_reads_and_none_is_left(fleet):
    seats, claims, readers = fleet
    desired = balance(seats, claims)
    for claim in claims:
        takers = readers[claim.key.stream_key]
        assert desired.get(claim.key) in takers if takers else claim.key not in desired


@given(fleets_of_two_streams())
def test_no_reader_of_a_stream_could_relieve_another_that_has_two_more(fleet):
    seats, claims, readers = fleet
    desired = balance(seats, claims)
    counts = loads(seats, claims, desired)
    both = set(readers["a"]) & set(readers["b"])
    for claim in claims:
        if (owner := desired.get(claim.key)) is None:
            continue
        # Who reads one stream only is as full as the others can make it.
        relief = both if owner in both else set(readers[claim.key.stream_key]) - both
        assert all(counts[other] >= counts[owner] - 1 for other in relief)


@given(fleets_of_two_streams())
def test_what_was_decided_for_two_streams_is_decided_again(fleet):
    seats, claims, _ = fleet
    desired = balance(seats, claims)
    settled = [replace(claim, owner=desired[claim.key]) for claim in claims if claim.key in desired]
    assert balance(seats, settled) == desired

"""Which leases are made for which shard graph: the cases of KCL's HierarchicalShardSyncerTest, numbered 1 to 84.

Graph A: 0 1 -> 6, 2 3 -> 7, 6 7 -> 8, 4 stays, 5 -> 9 10, and 10 names its parent only as the adjacent one.
Graph B: 0 1 -> 2 -> 3 4 -> 5 -> 6 7 -> 8 -> 9 10. Graph C: 0 -> 4 5, 4 -> 7 8, 5 -> 9 10, 2 3 -> 6, 1 stays.

Where ours differs from KCL, the case says why. One difference runs through all: KCL keeps LATEST in the lease until
the first checkpoint, ours pins it to a time once (rule T1). A case at LATEST is here one with a pin, given as the
shards that had closed before it; the service leaves those out of the listing.
"""

import asyncio

import pytest

from anabranch._core.shards.graph import ShardGraph, gaps
from anabranch._core.shards.lifecycle import (
    IncompleteListing,
    classify_missing_shard,
    listing_filter,
    missing_leases,
    pin,
    plan_bootstrap,
)
from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._model.leases import AppRow, Finish, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard, ShardFilter, at_timestamp
from anabranch.errors import LeaseStoreError
from anabranch.stores import MemoryLeaseStore

X = at_timestamp(1_000.0)
"""A time given by the user."""
L = at_timestamp(2_000.0)
"""`latest`, pinned."""
T = TRIM_HORIZON


def shard_name(number):
    return f"shardId-{number:012d}"


def build(roots, reshards):
    """`reshards`: (parents, children) in the order in which they happened."""
    ranges = dict(enumerate(even_ranges(roots)))
    parents = dict.fromkeys(ranges, ())
    closed = {}
    for step, (above, below) in enumerate(reshards):
        start, end = min(ranges[p].start for p in above), max(ranges[p].end for p in above)
        width = (end - start + 1) // len(below)
        for index, child in enumerate(below):
            last = end if index == len(below) - 1 else start + width * (index + 1) - 1
            ranges[child] = HashKeyRange(start + width * index, last)
            parents[child] = above
        closed |= dict.fromkeys(above, 100 + step)
    return {
        number: Shard(
            shard_id=shard_name(number),
            hash_key_range=ranges[number],
            starting_sequence_number=number,
            ending_sequence_number=closed.get(number),
            parent_shard_id=shard_name(parents[number][0]) if parents[number] else None,
            adjacent_parent_shard_id=shard_name(parents[number][1]) if len(parents[number]) > 1 else None,
        )
        for number in ranges
    }


A = build(6, [((0, 1), (6,)), ((2, 3), (7,)), ((6, 7), (8,)), ((5,), (9, 10))])
A[10] = Shard(
    shard_id=shard_name(10),
    hash_key_range=A[10].hash_key_range,
    starting_sequence_number=10,
    adjacent_parent_shard_id=shard_name(5),
)
B = build(2, [((0, 1), (2,)), ((2,), (3, 4)), ((3, 4), (5,)), ((5,), (6, 7)), ((6, 7), (8,)), ((8,), (9, 10))])
C = build(4, [((0,), (4, 5)), ((4,), (7, 8)), ((5,), (9, 10)), ((2, 3), (6,))])
CLOSED_A, CLOSED_B, CLOSED_C = {0, 1, 2, 3, 5, 6, 7}, set(range(9)), {0, 2, 3, 4, 5}


def stream(origin):
    return StreamRow(stream_key="1:s:2", name="s", arn="arn", created_seconds=1.0, origin=origin)


def row(number, **fields):
    return LeaseRow(key=LeaseKey("1:s:2", 0, shard_name(number)), **fields)


def numbers(rows):
    return {int(made.key.shard_id[-12:]) for made in rows}


def listing(graph, closed_before=()):
    return [shard for number, shard in graph.items() if number not in closed_before]


def made(graph, leased, origin, closed_before=()):
    rows = [row(number) for number in leased]
    scope = {shard.shard_id: shard for shard in listing(graph, closed_before)}
    known = ShardGraph().extended(shards=graph.values(), rows=rows)
    return missing_leases(stream(origin), known, scope, rows)


def bootstrapped(graph, origin, closed_before=()):
    return plan_bootstrap(stream(origin), listing(graph, closed_before))


# 1 to 17: an application that begins
@pytest.mark.parametrize("origin", [T, X, L])
def test_cases_1_and_2_no_shards_no_leases(origin):
    # KCL makes none and goes on. Ours makes none either, and lists again: a stream without shards is a bad listing.
    assert made({}, (), origin) == ()
    assert isinstance(bootstrapped({}, origin), IncompleteListing)


def test_cases_3_and_4_two_open_shards_both_get_a_lease_with_its_range_and_its_streams_key():
    graph = build(2, [])
    rows = bootstrapped(graph, L)
    assert [made.key for made in rows] == [LeaseKey("1:s:2", 0, shard_name(number)) for number in (0, 1)]
    assert [made.hash_key_range for made in rows] == even_ranges(2)


def test_cases_5_and_6_an_open_child_of_an_open_parent_gets_no_lease():
    # KCL must be told to ignore such a child. Ours takes it for what it is, a page from before the split: the parent
    # leads to it.
    graph = build(3, [((2,), (3, 4))])
    graph[2] = build(3, [])[2]
    assert numbers(made(graph, {0}, L)) == {1, 2}


@pytest.mark.parametrize("origin", [T, L])
def test_cases_7_8_and_33_the_lease_starts_where_the_application_does(origin):
    assert [made.start for made in bootstrapped(build(2, []), origin)] == [origin, origin]


def test_cases_9_to_12_and_42_without_leases_the_same_plan_comes_from_the_later_path():
    assert numbers(made(A, (), L, CLOSED_A)) == {4, 8, 9, 10}
    assert {lease.start for lease in made(A, (), L, CLOSED_A)} == {L}


def test_case_13_an_empty_listing_makes_nothing():
    assert made({}, {4}, L) == ()


@pytest.mark.parametrize(
    "case, origin, closed_before, expected",
    [
        (14, T, (), {0, 1, 2, 3, 4, 5}),
        (15, X, CLOSED_A, {4, 8, 9, 10}),
        (16, X, {0, 1, 2, 3}, {4, 5, 6, 7}),
        (17, L, CLOSED_A, {4, 8, 9, 10}),
    ],
)
def test_cases_14_to_17_the_generation_at_the_origin_gets_the_leases(case, origin, closed_before, expected):
    rows = bootstrapped(A, origin, closed_before)
    assert numbers(rows) == expected
    assert {made.start for made in rows} == {origin}


# 18 to 34: some leases exist
@pytest.mark.parametrize(
    "case, origin, closed_before, expected",
    [
        (18, T, (), {0}),
        # KCL makes 0 in these two too, at a time after its close: an iterator that returns nothing. Ours is told by the
        # service that 0 holds nothing since the origin.
        (19, X, CLOSED_A, set()),
        (20, X, {0, 1, 2, 3}, set()),
        (21, L, (), {0}),
    ],
)
def test_cases_18_to_21_one_shard_of_the_oldest_generation_is_missing(case, origin, closed_before, expected):
    assert numbers(made(A, {1, 2, 3, 4, 5, 7, 9, 10}, origin, closed_before)) == expected


def test_cases_22_to_25_a_parent_still_listed_as_open_leads_to_its_children():
    # 22, 23: KCL fails the whole sync. 24, 25: with a flag it ignores the children. Ours needs no flag.
    graph = dict(A)
    graph[5] = build(6, [])[5]
    assert numbers(bootstrapped(graph, L, CLOSED_A - {5})) == {4, 5, 8}


@pytest.mark.parametrize("case, origin", [(26, T), (27, X)])
def test_cases_26_and_27_a_second_run_makes_nothing_also_when_a_shard_has_finished(case, origin):
    first = bootstrapped(A, origin)
    assert numbers(first) == {0, 1, 2, 3, 4, 5}
    rows = list(first)
    assert plan_bootstrap(stream(origin), listing(A), rows) == ()
    # KCL's own SHARD_END says nothing of children; ours is written after their rows (rule S4).
    rows[0] = row(0, finish=Finish("end", (shard_name(6),)))
    rows.append(row(6, waits_for=(shard_name(0), shard_name(1))))
    assert plan_bootstrap(stream(origin), listing(A), rows) == ()


class FailingStore(MemoryLeaseStore):
    failing = ""

    async def read_leases(self, *, with_finished=False):
        if self.failing == "read":
            raise LeaseStoreError("away")
        return await super().read_leases(with_finished=with_finished)

    async def create_lease(self, row):
        if self.failing == row.key.shard_id:
            raise LeaseStoreError("away")
        return await super().create_lease(row)


@pytest.mark.parametrize("origin", [T, X])
@pytest.mark.parametrize("failing", ["read", *(shard_name(number) for number in range(6))])
def test_cases_28_to_31_a_bootstrap_that_failed_anywhere_is_completed_by_the_next(origin, failing):
    async def bootstrap(store):
        rows = await store.read_leases(with_finished=True)
        for planned in plan_bootstrap(stream(origin), listing(A), rows):
            await store.create_lease(planned)
        return numbers(await store.read_leases(with_finished=True))

    async def main():
        store = FailingStore()
        await store.open(AppRow(app="a", app_id="1", created_wall_ms=1))
        store.failing = failing
        with pytest.raises(LeaseStoreError):
            await bootstrap(store)
        store.failing = ""
        assert await bootstrap(store) == {0, 1, 2, 3, 4, 5}
        assert await bootstrap(store) == {0, 1, 2, 3, 4, 5}

    asyncio.run(main())


def test_case_32_a_stream_that_is_not_there_is_a_deleted_stream():
    # KCL queues the stream's leases for deletion. Ours deletes nothing: the consumer stops and says so (rule S3).
    assert classify_missing_shard(stream(T), None) == "stream_deleted"


def test_case_34_of_unrelated_shards_only_those_since_the_origin_get_a_lease():
    graph = build(3, [])
    closed = build(3, [((1,), (3, 4))])[1]
    graph[1] = closed
    assert numbers(made(graph, {0}, L, {1})) == {2}


# 35 to 69: holes
HOLES_AT_LATEST = [
    (35, A, {3, 4, 5}, {0, 1}, {2, 6}),
    (36, A, {4, 5, 7}, {0, 1, 2, 3}, {6}),
    (37, A, {2, 6}, {0, 1, 5}, {3, 4, 9, 10}),
    (38, A, {4, 9, 10}, CLOSED_A, {8}),
    (39, C, {9, 10}, CLOSED_C, {1, 6, 7, 8}),
    (40, A, {4, 5, 6, 7}, {0, 1, 2, 3}, set()),
    (41, A, set(range(8)), (), set()),
    (43, A, {0, 1, 4, 7, 9, 10}, {2, 3, 5}, set()),
    (44, B, {6}, {0, 1, 2, 3, 4, 5}, {7}),
    (45, B, {5}, {0, 1, 2, 3, 4}, set()),
    (46, B, set(range(6)), (), set()),
    (47, B, set(), CLOSED_B, {9, 10}),
]


@pytest.mark.parametrize("case, graph, leased, closed_before, expected", HOLES_AT_LATEST)
def test_cases_35_to_47_holes_are_filled_at_the_generation_of_the_pin(case, graph, leased, closed_before, expected):
    rows = made(graph, leased, L, closed_before)
    assert numbers(rows) == expected
    assert {lease.start for lease in rows} <= {L}
    assert all(lease.waits_for == () for lease in rows)


@pytest.mark.parametrize(
    "case, graph, leased, expected",
    [
        # KCL fills these with closed shards that hold nothing after its LATEST. With the pin at the tip ours sees that.
        (35, A, {3, 4, 5}, set()),
        (36, A, {4, 5, 7}, set()),
        (37, A, {2, 6}, {4, 9, 10}),
        (38, A, {4, 9, 10}, {8}),
        (44, B, {6}, set()),
    ],
)
def test_cases_35_to_47_with_a_pin_at_the_tip_closed_shards_get_no_lease(case, graph, leased, expected):
    closed = {number for number, shard in graph.items() if not shard.is_open}
    assert numbers(made(graph, leased, L, closed)) == expected


HOLES_FROM_THE_OLDEST = [
    (48, A, {3, 4, 5}, {0, 1, 2}),
    (49, A, {4, 5, 7}, {0, 1}),
    (50, A, {2, 6}, {3, 4, 5}),
    (51, A, {4, 9, 10}, {0, 1, 2, 3}),
    (52, A, {4, 5, 6, 7}, set()),
    (53, A, set(range(8)), set()),
    (54, A, set(), {0, 1, 2, 3, 4, 5}),
    (55, A, {0, 1, 4, 7, 9, 10}, set()),
    (56, B, {5}, set()),
    (57, B, set(range(6)), set()),
    (58, B, set(), {0, 1}),
]


@pytest.mark.parametrize("origin, first", [(T, 48), (X, 59)])
@pytest.mark.parametrize("case, graph, leased, expected", HOLES_FROM_THE_OLDEST)
def test_cases_48_to_69_holes_are_filled_from_the_oldest_generation(case, graph, leased, expected, origin, first):
    rows = made(graph, leased, origin)
    assert numbers(rows) == expected
    assert {lease.start for lease in rows} <= {origin}


@pytest.mark.parametrize("origin", [T, X])
def test_the_case_that_kcl_has_disabled_a_hole_beside_a_late_lease_does_not_restart_the_stream(origin):
    # KCL makes 0 and 1 here and reads the whole stream again ("out-of-order lease creation" in its test).
    rows = made(B, {6}, origin)
    assert numbers(rows) == {7}
    assert {lease.start for lease in rows} == {TRIM_HORIZON}  # 5 is in scope: 7 was born after the origin


# 70 to 84: the walk, the calls, the retries
def test_cases_70_to_73_descent_is_by_known_parents_only():
    graph = ShardGraph().extended(shards=A.values())
    assert graph.ancestors([]) == {}
    assert graph.descendants(["shardId-000000000099"]) == {}
    assert shard_name(8) in graph.descendants([shard_name(3)])
    assert set(graph.ancestors([shard_name(8)])) == {shard_name(number) for number in (0, 1, 2, 3, 6, 7)}
    assert shard_name(10) in graph.descendants([shard_name(5)])  # by its adjacent parent alone
    assert numbers(made(A, {8}, L, CLOSED_A)) == {4, 9, 10}


def test_cases_74_to_77_the_listing_is_asked_for_from_the_origin_on():
    # KCL asks for the shards AT the position and needs another listing for the rest, and none at all may be open in the
    # second after a split. FROM the position is one listing for both.
    assert listing_filter(T) is None
    assert listing_filter(X) == ShardFilter("FROM_TIMESTAMP", timestamp_seconds=1_000.0)
    latest = pin("latest", server_seconds=2_005.0, created_seconds=1.0)
    assert listing_filter(latest) == ShardFilter("FROM_TIMESTAMP", timestamp_seconds=2_000.0)


def test_cases_78_to_80_a_listing_that_does_not_cover_the_hash_space_is_no_base_for_anything():
    # How often it is listed again is the engine's to bound; the plan is made only from a good one.
    graph = build(2, [])
    holed = [graph[1]]
    planned = plan_bootstrap(stream(T), holed)
    assert planned == IncompleteListing((graph[0].hash_key_range,), overlapping=False)
    assert "1 hash key ranges have no shard" in str(planned)
    assert numbers(plan_bootstrap(stream(T), list(graph.values()))) == {0, 1}


def test_cases_81_to_84_the_streams_row_comes_first():
    # KCL's optional stream table has a mode in which its failure is ignored. Ours is put before any lease (rule S2), so
    # that two first workers agree on one origin.
    async def main():
        store = MemoryLeaseStore()
        await store.open(AppRow(app="a", app_id="1", created_wall_ms=1))
        first, second = await store.put_stream(stream(T)), await store.put_stream(stream(X))
        assert first == second == stream(T)

    asyncio.run(main())


# PeriodicShardSyncManagerTest: is the hash space covered?
@pytest.mark.parametrize(
    "situation, ranges, covered",
    [
        ("complete", even_ranges(4), True),
        ("unsorted", even_ranges(4)[::-1], True),
        ("overlapping", [*even_ranges(4), *even_ranges(3)], True),
        ("nothing", [], False),
        ("the first is missing", even_ranges(4)[1:], False),
        ("one within is missing", [*even_ranges(4)[:1], *even_ranges(4)[2:]], False),
        ("the last is missing", even_ranges(4)[:-1], False),
    ],
)
def test_holes_in_the_hash_space_are_found(situation, ranges, covered):
    assert (gaps(ranges) == ()) is covered


def test_a_finished_shard_whose_child_lost_its_row_leads_to_the_child_again():
    # A row deleted by hand comes back with the next listing; KCL waits for three of them, two minutes apart.
    rows = [row(0, finish=Finish("end", (shard_name(2),))), row(1, finish=Finish("end", (shard_name(2),)))]
    known = ShardGraph().extended(shards=B.values(), rows=rows)
    scope = {shard.shard_id: shard for shard in B.values()}
    (child,) = missing_leases(stream(X), known, scope, rows)
    assert child.key.shard_id == shard_name(2)
    assert child.start == TRIM_HORIZON
    assert child.waits_for == (shard_name(0), shard_name(1))

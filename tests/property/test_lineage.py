"""Laws of lineage, over random histories of splits and merges and random orders of everything that workers do.

Every shard with records since the origin is read, once, from its beginning or from the origin; every parent before its
children; no gate stays shut; and in a run in which nobody deletes rows by hand, the audit finds nothing missing.
"""

import sys
from random import Random

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from reshard_history import History

from anabranch._core.shards import lifecycle
from anabranch._core.shards.graph import ShardGraph, gaps, has_overlap, overlaps
from anabranch._core.shards.lifecycle import (
    IncompleteListing,
    ShardEnd,
    missing_leases,
    open_parents,
    pin,
    plan_bootstrap,
    plan_end,
    plan_trimmed,
    removable,
    roots,
)
from anabranch._model.leases import Checkpoint, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Position

RANDOM = st.integers(0, 2**32 - 1).map(Random)


def history_of(random, reshard_count):
    history = History(random.randrange(1, 5))
    for _ in range(reshard_count):
        history.reshard(random)
        history.now += random.randrange(0, 3)
    return history


def stream_row(start, history):
    origin = pin(start, server_seconds=float(history.now), created_seconds=0.0)
    return StreamRow(stream_key="1:s:2", name="s", arn="arn", created_seconds=0.0, origin=origin)


@given(RANDOM, st.integers(0, 12))
def test_the_roots_of_every_instant_cut_the_hash_space(random, reshard_count):
    history = history_of(random, reshard_count)
    for since in range(9, history.now + 1):  # also the seconds in which neither parent nor child is open
        ranges = [shard.hash_key_range for shard in roots(history.listing(since))]
        assert gaps(ranges) == ()
        assert not has_overlap(ranges)


@given(RANDOM, st.integers(0, 12))
def test_a_listing_that_lacks_an_open_root_is_refused(random, reshard_count):
    history = history_of(random, reshard_count)
    since = random.randrange(10, history.now + 1)
    listing = history.listing(since)
    for missing in (shard for shard in roots(listing) if shard.is_open):
        rest = [shard for shard in listing if shard is not missing]
        planned = plan_bootstrap(stream_row(float(since), history), rest)
        assert isinstance(planned, IncompleteListing)
        assert planned.uncovered == (missing.hash_key_range,)


class Fleet:
    """Workers that use the code under test in every order, crash between any two writes, and remember what they did."""

    def __init__(self, random, history, since):
        self.random = random
        self.history = history
        self.since = since
        self.stream = stream_row(float(since) if since else "trim_horizon", history)
        self.graph = ShardGraph()
        self.rows = {}
        self.started = {}
        self.ended = {}

    def bootstrap(self):
        listing = self.history.listing(self.since)
        planned = plan_bootstrap(self.stream, listing, list(self.rows.values()))
        for row in planned[: self.random.randrange(len(planned) + 1)]:  # dies half-way; the next one completes it
            self.rows.setdefault(row.key.shard_id, row)
        self.history.reshard(self.random)
        for row in plan_bootstrap(self.stream, self.history.listing(self.since), list(self.rows.values())):
            self.rows.setdefault(row.key.shard_id, row)

    def leases(self):
        return {row.key: row for row in self.rows.values()}

    def list(self):
        self.graph = self.graph.extended(shards=self.history.listing())

    def scope(self):
        return {shard.shard_id: shard for shard in self.history.listing(self.since)}

    def glance(self):
        """A listing put together from pages of two instants: any shard may be missing from it."""
        self.graph = self.graph.extended(
            shards=[shard for shard in self.history.listing() if self.random.random() < 0.6]
        )

    def may_start(self):
        return [
            shard_id
            for shard_id, row in self.rows.items()
            if shard_id not in self.started and not row.is_finished and not open_parents(row, self.leases())
        ]

    def start(self, shard_id):
        row = self.rows[shard_id]
        for parent in self.history.parents[shard_id]:
            if self.history.closed[parent] >= self.since:
                assert parent in self.ended or self.history.is_gone(parent), f"{shard_id} started before {parent}"
        for other in self.started:
            if other in self.rows and not self.rows[other].is_finished and other != shard_id:
                assert not overlaps(self.history.ranges[other], self.history.ranges[shard_id]), (
                    f"{shard_id} started while {other} still held records of the same keys"
                )
        born = self.history.born[shard_id]
        if row.start == TRIM_HORIZON:
            assert born >= self.since, f"{shard_id} would be read from before the origin"
        self.started[shard_id] = None
        self.rows[shard_id] = row = replace(row, epoch=row.epoch + 1)
        if self.random.random() < 0.5:
            self.rows[shard_id] = replace(row, checkpoint=Checkpoint(Position(born)))

    def may_end(self):
        return [
            shard_id
            for shard_id in self.started
            if shard_id in self.rows
            and not self.rows[shard_id].is_finished
            and shard_id in self.history.closed
            and not self.history.is_gone(shard_id)
        ]

    def end(self, shard_id):
        row = self.rows[shard_id]
        self.glance()
        if self.random.random() < 0.7:  # ChildShards came with the last read
            self.graph = self.graph.extended(child_shards=self.history.child_shards(shard_id))
        rows = list(self.rows.values())
        graph = self.graph.extended(rows=rows)
        end = plan_end(row, graph, None, rows)
        if end is None:
            self.list()
            end = plan_end(row, self.graph.extended(rows=rows), self.scope(), rows)
        if end is None:  # the children themselves are gone from the listing: the next read says NotFound
            assert any(self.history.is_gone(child.shard_id) for child in self.history.child_shards(shard_id))
            return
        self.perform(shard_id, end)

    def may_be_trimmed(self):
        return [s for s, row in self.rows.items() if not row.is_finished and self.history.is_gone(s)]

    def trim(self, shard_id):
        row = self.rows[shard_id]
        if shard_id not in self.started and open_parents(row, self.leases()):
            return
        self.started.setdefault(shard_id)
        self.rows[shard_id] = row = replace(row, epoch=row.epoch + 1)
        self.list()
        rows = list(self.rows.values())
        self.perform(shard_id, plan_trimmed(self.stream, row, self.graph.extended(rows=rows), self.scope(), rows))

    def perform(self, shard_id, end: ShardEnd):
        for row in end.rows:
            if self.random.random() < 0.05:
                return  # the owner dies here; the next owner ends the shard again
            assert row.key.shard_id not in self.ended, f"{row.key.shard_id} comes back"
            self.rows.setdefault(row.key.shard_id, row)
        row = self.rows[shard_id]
        self.rows[shard_id] = replace(row, finish=end.finish, checkpoint=Checkpoint(Position(1)))
        self.ended[shard_id] = None
        children = [self.rows[child] for child in end.finish.children]
        for child in [child for child in children if not child.is_finished and not open_parents(child, self.leases())]:
            if child.key.shard_id not in self.started and self.random.random() < 0.5:
                self.start(child.key.shard_id)

    def clean(self):
        listed = {shard.shard_id for shard in self.history.listing()}
        for row in removable(list(self.rows.values()), self.graph, listed):
            assert self.history.is_gone(row.key.shard_id)
            del self.rows[row.key.shard_id]

    def audit(self):
        rows = list(self.rows.values())
        graph = self.graph.extended(shards=self.history.listing(), rows=rows)
        missing = missing_leases(self.stream, graph, self.scope(), rows)
        if not self.history.horizon:
            assert missing == (), "without trimming, every shard is accounted for at every moment"
        for row in missing:
            assert row.key.shard_id not in self.ended, f"{row.key.shard_id} comes back"
            self.rows[row.key.shard_id] = row

    def step(self):
        """One thing that can be done now; False if there is none."""
        choices = [(self.start, s) for s in self.may_start()]
        choices += [(self.end, s) for s in self.may_end()]
        choices += [(self.trim, s) for s in self.may_be_trimmed()]
        if not choices:
            return False
        action, shard_id = self.random.choice(choices)
        action(shard_id)
        return True


def run(random, *, reshard_count, trims):
    history = history_of(random, random.randrange(0, 6))
    since = random.choice([0, random.randrange(10, history.now + 1)])
    fleet = Fleet(random, history, since)
    fleet.bootstrap()
    resharded = 0
    while resharded < reshard_count:
        for _ in range(random.randrange(0, 4)):
            fleet.step()
        action = random.randrange(5)
        if action == 0:
            fleet.glance()
        elif action == 1:
            fleet.audit()
        elif action == 2 and trims:
            history.horizon = random.randrange(history.horizon, history.now)
            fleet.clean()
        else:
            history.reshard(random)
            resharded += 1
    for _ in range(60 * (reshard_count + 10)):
        if not fleet.step():
            fleet.audit()
            if not fleet.step():
                break
    else:
        raise AssertionError("the fleet never comes to rest")
    return fleet


def check_end(fleet):
    history = fleet.history
    for row in fleet.rows.values():
        assert not open_parents(row, fleet.leases()) or row.is_finished, f"the gate of {row.key.shard_id} stays shut"
    for shard_id in history.in_scope(fleet.since):
        assert shard_id in fleet.started or history.is_gone(shard_id), f"{shard_id} is never read"
    for shard_id in history.open_shards():
        assert not fleet.rows[shard_id].is_finished


@given(RANDOM, st.integers(0, 10))
@settings(deadline=None, max_examples=200)
def test_every_record_is_read_and_parents_before_children(random, reshard_count):
    fleet = run(random, reshard_count=reshard_count, trims=False)
    check_end(fleet)
    assert set(fleet.started) == set(fleet.history.in_scope(fleet.since))


@given(RANDOM, st.integers(0, 10))
@settings(deadline=None, max_examples=200)
def test_what_is_trimmed_away_opens_the_way_and_what_is_left_is_read(random, reshard_count):
    check_end(run(random, reshard_count=reshard_count, trims=True))


@given(RANDOM, st.integers(1, 10))
@settings(deadline=None)
def test_rows_that_a_hand_deleted_are_made_again_and_nothing_else(random, reshard_count):
    fleet = run(random, reshard_count=reshard_count, trims=False)
    for shard_id in sorted(fleet.rows):
        if random.random() < 0.4:
            del fleet.rows[shard_id]
    rows = list(fleet.rows.values())
    listing = fleet.history.listing(fleet.since)
    scope = {shard.shard_id: shard for shard in listing}
    graph = ShardGraph().extended(shards=fleet.history.listing(), rows=rows)
    made = missing_leases(fleet.stream, graph, scope, rows)
    ids = [row.key.shard_id for row in made]
    assert not set(ids) & set(fleet.rows)
    unfinished = [row.key.shard_id for row in (*rows, *made) if not row.is_finished]
    for shard_id in fleet.history.open_shards():
        assert shard_id in unfinished or shard_id in graph.descendants(unfinished), f"{shard_id} will never be read"
    for shard_id in ids:
        assert not set(graph.descendants([shard_id])) & set(ids)
        below = [fleet.rows[name] for name in graph.descendants([shard_id]) if name in fleet.rows]
        assert not any(row.epoch for row in below), f"{shard_id} was finished before a shard below it was taken"
    assert missing_leases(fleet.stream, graph, scope, [*rows, *made]) == ()


def only_the_children(graph, scope, children, with_rows):
    return []


def no_gate(row, leases):
    return ()


def any_children_are_all(graph, shard_id, children):
    return bool(children)


@pytest.mark.parametrize(
    "place, name, broken",
    [
        (lifecycle, "_unread_ancestors", only_the_children),
        (sys.modules[__name__], "open_parents", no_gate),
        (lifecycle, "_cover_hash_keys", any_children_are_all),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_laws_catch_broken_gates(place, name, broken, monkeypatch):
    monkeypatch.setattr(place, name, broken)
    for seed in range(500):
        try:
            check_end(run(Random(seed), reshard_count=6, trims=seed % 2 == 0))
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{name} may be broken unseen")

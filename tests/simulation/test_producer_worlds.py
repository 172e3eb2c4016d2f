"""The producer's core in 200 seeded worlds, and broken variants that the checkers must catch."""

import pytest
from producer_world import run_world

from anabranch._core.writing.lanes import Lanes
from anabranch._core.writing.settlement import RETRY_TABLE, RetryAction
from anabranch._core.writing.shard_map import ShardMap
from anabranch._core.writing.stream_writer import StreamWriter

SEEDS = 200
SEEDS_FOR_A_VARIANT = 120


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_every_record_has_one_true_outcome_and_every_key_its_order(first):
    for seed in range(first, first + 50):
        try:
            run_world(seed)
        except AssertionError as error:
            raise AssertionError(f"run_world({seed}): {error}") from error


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_more_worlds_hold_too():
    for seed in range(SEEDS, SEEDS + 1_000):
        run_world(seed)


def action(outcome, next_step):
    return lambda patch: patch.setitem(RETRY_TABLE, outcome, RetryAction(next_step))


def children_do_not_wait(patch):
    plain = Lanes.lane_for

    def lane_for(self, *arguments):
        lane = plain(self, *arguments)
        lane.blocker_count = 0
        return lane

    patch.setattr(Lanes, "lane_for", lane_for)


def many_in_flight(patch):
    plain = Lanes.queue_if_ready

    def queue_if_ready(self, lane, now_ms):
        kept, lane.in_flight = lane.in_flight, 0
        plain(self, lane, now_ms)
        lane.in_flight = kept

    patch.setattr(Lanes, "queue_if_ready", queue_if_ready)


def retries_go_last(patch):
    def send_again(self, lane, bundle, next_step, now_ms, *, is_alone):
        self._lanes.requeue_last([bundle], now_ms)

    patch.setattr(StreamWriter, "_send_again", send_again)


def aggregates_without_a_map(patch):
    """Records of unknown shards share an aggregate."""
    plain = Lanes.lane_for

    def lane_for(self, *arguments):
        was, self.is_ordered = self.is_ordered, False
        lane = plain(self, *arguments)
        self.is_ordered = was
        lane.aggregates = lane is self._shard_lanes.get(None) or lane.aggregates
        return lane

    patch.setattr(Lanes, "lane_for", lane_for)


def the_map_never_learns(patch):
    """What aiokpl does after a split."""
    patch.setattr(ShardMap, "learn", lambda *_: None)
    patch.setattr(ShardMap, "request_refresh", lambda *_: None)


def expired_records_vanish(patch):
    def expire(self, now_ms):
        for lane in self._lanes.active():
            lane.take_unsent()
        self._check_expiry_ms = None

    patch.setattr(StreamWriter, "_expire", expire)


def settles_before_dividing(patch):
    plain = Lanes.requeue_first

    def requeue_first(self, records, origin, now_ms):
        origin.is_settled = True
        plain(self, records, origin, now_ms)

    patch.setattr(Lanes, "requeue_first", requeue_first)


def results_are_shifted(patch):
    plain = StreamWriter._on_results

    def on_results(self, call, response, now_ms):
        response.entries.reverse()
        plain(self, call, response, now_ms)

    patch.setattr(StreamWriter, "_on_results", on_results)


VARIANTS = {
    "an aggregate in the wrong shard counts as delivered": action("written_straddling", "deliver"),
    "an aggregate in an unknown shard counts as delivered": action("written_elsewhere", "deliver"),
    "a call without a response counts as not written": action("call_maybe_written", "fail"),
    "children do not wait for their parents' records in flight": children_do_not_wait,
    "several records of a lane in flight": many_in_flight,
    "what failed goes last": retries_go_last,
    "aggregates without a shard map": aggregates_without_a_map,
    "the map never learns": the_map_never_learns,
    "expired records vanish": expired_records_vanish,
    "a divided bundle is settled as well": settles_before_dividing,
    "results are mixed up": results_are_shifted,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_checkers_catch_a_producer_in_which(name, monkeypatch):
    VARIANTS[name](monkeypatch)
    for seed in range(SEEDS_FOR_A_VARIANT):
        try:
            run_world(seed)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"no checker noticed within {SEEDS_FOR_A_VARIANT} seeds that {name}")

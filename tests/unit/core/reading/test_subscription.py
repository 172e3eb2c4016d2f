"""A subscription follows its table: when it subscribes, from where, and what follows when it ends."""

from random import Random
from types import SimpleNamespace

import pytest

from anabranch import reasons
from anabranch._aws.errors import service_error
from anabranch._core.reading.subscription import (
    FULL_AFTER_MS,
    MOVES,
    PAUSE_MAX_MS,
    POLLED_MS,
    SILENT_AFTER_MS,
    SPREAD_MAX_MS,
    SPREAD_STEP_MS,
    Subscription,
    event_reserve_bytes,
    first_at_ms,
    outcome_of,
)
from anabranch._model.streams import TRIM_HORIZON, Position, after_sequence_number, at_sequence_number
from anabranch._wire.bodies import AwsError
from anabranch.budget import READ_RESERVE_BYTES

DICE = Random(1)
LOWEST = SimpleNamespace(random=lambda: 0.0)


def subscribed(now_ms=0):
    subscription = Subscription("billing", now_ms)
    subscription.begin(now_ms)
    subscription.accept(now_ms)
    return subscription


def again(subscription, now_ms=None):
    """Subscribes when it is due."""
    at_ms = max(subscription.due_at_ms, now_ms or 0)
    subscription.begin(at_ms)
    subscription.accept(at_ms)
    return at_ms


def position_of(subscription, read_after=None):
    return subscription.starting_position(
        read_after, last_record=at_sequence_number(50) if read_after else TRIM_HORIZON, checkpoint=at_sequence_number(7)
    )


def test_every_state_has_its_moves_and_every_move_leads_to_a_state():
    assert {to for moves in MOVES.values() for to in moves.values()} == set(MOVES)
    assert set(MOVES["ended"].values()) == {"ended"}


def test_a_renewal_follows_at_once_and_is_counted():
    subscription = subscribed()
    subscription.receive("100", 1_000)
    subscription.end("expired", "", 300_000, DICE)
    assert (subscription.state, subscription.due_at_ms, subscription.renewal_count) == ("waiting", 300_000, 1)
    assert subscription.reason is None


def test_the_service_is_called_at_most_once_a_second_for_a_shard():
    subscription = subscribed(now_ms=500)
    subscription.receive("100", 510)
    subscription.end("broken", "cut", 520, DICE)
    assert subscription.due_at_ms == 1_500


def test_the_continuation_is_where_the_next_subscription_starts():
    subscription = subscribed()
    assert position_of(subscription) == TRIM_HORIZON
    subscription.receive("100", 10)
    assert position_of(subscription) == after_sequence_number(100)


def test_a_continuation_that_reading_has_passed_is_not_used():
    subscription = subscribed()
    subscription.receive("100", 10)
    assert position_of(subscription, Position(99)) == after_sequence_number(100)
    assert position_of(subscription, Position(101)) == at_sequence_number(50)


def test_a_rejected_continuation_is_followed_by_the_last_record_and_then_by_the_checkpoint():
    subscription = subscribed()
    subscription.receive("100", 10)
    subscription.end("expired", "", 300_000, DICE)
    tried = []
    for _ in range(3):
        assert not subscription.positions_are_used_up
        subscription.begin(subscription.due_at_ms)
        tried.append(position_of(subscription, Position(99)))
        subscription.end("rejected", "invalid", subscription.due_at_ms, DICE)
    assert tried == [after_sequence_number(100), at_sequence_number(50), at_sequence_number(7)]
    assert subscription.positions_are_used_up
    again(subscription)
    subscription.receive("200", subscription.due_at_ms)
    assert position_of(subscription, Position(150)) == after_sequence_number(200)


def test_a_new_owner_polls_while_the_old_subscription_is_in_use():
    subscription = Subscription("billing", 0)
    for second in range(5):
        assert subscription.is_due
        assert subscription.due_at_ms == second * 1_000
        subscription.begin(second * 1_000)
        assert subscription.is_polled == (second > 0)
        subscription.end("in_use", "ResourceInUseException", second * 1_000, DICE)
        assert subscription.is_polled
    again(subscription)
    assert subscription.state == "active"


@pytest.mark.parametrize("outcome, lasts_ms", [("broken", 100), ("silent", SILENT_AFTER_MS), ("failed", 100)])
def test_subscriptions_that_break_again_and_again_although_events_come_are_followed_by_polling(outcome, lasts_ms):
    subscription, states, now_ms = Subscription("billing", 0), [], 0
    for _ in range(4):
        now_ms = again(subscription, now_ms)
        subscription.receive("100", now_ms)
        now_ms += lasts_ms
        subscription.end(outcome, "cut", now_ms, LOWEST)
        states.append(subscription.state)
    assert states == ["waiting", "waiting", "polled", "polled"]
    assert subscription.due_at_ms - now_ms == 16_000
    assert subscription.reason == reasons.SubscriptionFailing(error="cut", failure_count=4)


def test_a_break_now_and_then_is_followed_by_the_next_subscription_at_once():
    subscription, now_ms = Subscription("billing", 0), 0
    for _ in range(9):
        now_ms = again(subscription, now_ms)
        subscription.receive("100", now_ms)
        now_ms += 70_000
        subscription.end("broken", "cut", now_ms, LOWEST)
        assert (subscription.state, subscription.due_at_ms) == ("waiting", now_ms)
    assert subscription.reason is None


def test_subscriptions_without_an_event_pause_longer_and_longer_and_then_the_shard_is_polled():
    subscription, pauses, states, now_ms = Subscription("billing", 0), [], [], 0
    for _ in range(7):
        now_ms = again(subscription, now_ms)
        subscription.end("broken", "cut", now_ms, LOWEST)
        pauses.append(subscription.due_at_ms - now_ms)
        states.append(subscription.state)
    assert pauses == [2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    assert states == ["waiting", "waiting", *["polled"] * 5]
    assert subscription.reason == reasons.SubscriptionFailing(error="cut", failure_count=7)


def test_the_pause_has_a_tenth_of_jitter():
    pauses = set()
    for seed in range(50):
        subscription = subscribed()
        subscription.end("broken", "cut", 10_000, Random(seed))
        pauses.add(subscription.due_at_ms - 10_000)
    assert 2_000 <= min(pauses) < max(pauses) <= 2_200


def test_an_event_resets_the_pause():
    subscription = subscribed()
    for _ in range(4):
        subscription.end("broken", "cut", subscription.due_at_ms, DICE)
        again(subscription)
    subscription.receive("100", subscription.due_at_ms)
    subscription.end("broken", "cut", subscription.due_at_ms + 5_000, DICE)
    assert subscription.state == "waiting"
    assert subscription.due_at_ms == max(subscription._called_at_ms + 1_000, subscription._called_at_ms + 5_000)


def test_silence_is_measured_from_the_last_event():
    subscription = subscribed(now_ms=1_000)
    assert subscription.silent_at_ms == 1_000 + SILENT_AFTER_MS
    subscription.receive("100", 5_000)
    assert subscription.silent_at_ms == 5_000 + SILENT_AFTER_MS
    subscription.end("silent", "no event", 40_000, DICE)
    assert subscription.silent_at_ms is None
    assert subscription.due_at_ms == 40_000


def test_after_a_take_over_only_a_later_heartbeat_allows_the_next_subscription():
    subscription = subscribed()
    subscription.receive("100", 10)
    subscription.end("in_use", "taken", 8_000, DICE)
    assert subscription.state == "taken_over"
    assert not subscription.is_due
    assert not subscription.prove(7_999, 8_100)
    assert not subscription.prove(8_000, 8_100)
    assert subscription.prove(8_001, 9_000)
    assert (subscription.state, subscription.due_at_ms) == ("waiting", 9_000)


def test_three_take_overs_in_a_minute_mean_that_another_fleet_uses_the_consumer():
    subscription, now_ms = subscribed(), 0
    for taken in range(3):
        now_ms += 15_000
        subscription.end("in_use", "taken", now_ms, DICE)
        assert subscription.prove(now_ms + 1, now_ms + 2)
        if taken < 2:
            again(subscription)
    assert subscription.is_polled
    assert subscription.reason == reasons.ConsumerNameShared(consumer="billing")
    assert subscription.due_at_ms == now_ms + 2 + POLLED_MS


def test_take_overs_of_another_minute_do_not_count():
    subscription, now_ms = subscribed(), 0
    for _ in range(5):
        now_ms += 31_000
        subscription.end("in_use", "taken", now_ms, DICE)
        subscription.prove(now_ms + 1, now_ms + 2)
        assert subscription.state == "waiting"
        again(subscription)


def test_a_key_that_cannot_be_used_is_named_and_not_polled_around():
    subscription, now_ms = subscribed(), 0
    for _ in range(10):
        subscription.end("key_denied", "KMSDisabledException", now_ms, DICE)
        assert not subscription.is_polled
        now_ms = again(subscription)
    assert subscription.reason == reasons.StreamKeyDenied(error="KMSDisabledException")


def test_a_shard_that_may_not_subscribe_is_polled():
    subscription = Subscription("billing", 0)
    subscription.begin(0)
    subscription.end("denied", "AccessDeniedException", 10, DICE)
    assert subscription.is_polled
    assert subscription.due_at_ms == 10 + POLLED_MS


def test_without_room_it_subscribes_again_at_least_five_seconds_after_it_was_accepted():
    subscription = subscribed(now_ms=1_000)
    subscription.fill()
    assert not subscription.is_due
    subscription.find_room(2_000)
    assert subscription.due_at_ms == 6_000
    subscription = subscribed(now_ms=1_000)
    subscription.fill()
    subscription.find_room(1_000 + FULL_AFTER_MS)
    assert subscription.due_at_ms == 1_000 + FULL_AFTER_MS


def test_a_closed_subscription_opens_again():
    subscription = subscribed()
    subscription.close()
    assert not subscription.is_due
    subscription.open(200)
    assert subscription.due_at_ms == 1_000


@pytest.mark.parametrize(
    "code, outcome",
    [
        ("KMSThrottlingException", "throttled"),
        ("KMSDisabledException", "key_denied"),
        ("KMSSomethingNewException", "key_denied"),
        ("InternalFailureException", "failed"),
        ("AccessDeniedException", "denied"),
    ],
)
def test_errors_of_the_key_are_distinguished_by_their_prefix(code, outcome):
    assert outcome_of(service_error("SubscribeToShard", AwsError(code, ""), status=400)) == outcome


def test_first_subscriptions_are_spread_over_a_few_seconds():
    times = []
    for _ in range(1_000):
        times.append(first_at_ms(50, max(times, default=None), DICE))
    assert times[:16] == [50 + number * SPREAD_STEP_MS for number in range(16)]
    assert max(times) <= 50 + SPREAD_MAX_MS
    assert sorted(times)[500] > SPREAD_MAX_MS * 0.3


def test_a_shard_that_comes_alone_subscribes_at_once():
    assert first_at_ms(10_000, 3_000, DICE) == 10_000


def test_every_event_fits_into_every_budget():
    assert event_reserve_bytes(14 << 20) == READ_RESERVE_BYTES
    assert event_reserve_bytes(1_000) == 3_000


@pytest.mark.parametrize("outcome", ["expired", "broken", "silent", "failed", "throttled", "key_denied", "missing"])
def test_no_pause_is_longer_than_a_minute(outcome):
    subscription, now_ms = subscribed(), 0
    for _ in range(20):
        subscription.end(outcome, "trouble", now_ms, DICE)
        assert subscription.due_at_ms - now_ms <= PAUSE_MAX_MS * 1.1
        now_ms = again(subscription)

"""What a producer tells about a stream: what was delivered, and when a trouble is over."""

from anabranch._core.writing.limiter import ShardPace
from anabranch._core.writing.stream_writer import WriteNews
from anabranch.config import ProducerSettings
from anabranch.events import DeliveryProgress, ListingRecovered, WriteRecovered, WriteUnthrottled
from anabranch.measures import WriteCounters


def test_deliveries_are_reported_at_most_once_a_second_and_add_up():
    news, counters, told = WriteNews("orders"), WriteCounters(), []
    for now_ms in range(0, 10_000, 50):
        counters.delivered_count += 10
        counters.delivered_bytes += 100
        counters.requests.add(20)
        told += news.call_succeeded(counters, now_ms)
    told += news.flow(counters, 10_000)
    assert all(isinstance(event, DeliveryProgress) for event in told)
    assert len(told) == 10
    assert sum(event.delivered_count for event in told) == 2_000
    assert sum(event.delivered_bytes for event in told) == 20_000
    assert sum(event.requests.count for event in told) == 200
    assert list(news.flow(counters, 20_000)) == [], "nothing flowed"


def test_requests_that_failed_and_succeed_again_are_reported_once():
    news, counters = WriteNews("orders"), WriteCounters()
    for now_ms in (1_000, 2_000, 4_000):
        news.call_failed(now_ms)
    assert list(news.call_succeeded(counters, 11_000)) == [
        WriteRecovered(stream="orders", failure_count=3, seconds=10.0)
    ]  # fmt: skip
    assert list(news.call_succeeded(counters, 12_000)) == []


def test_a_shard_at_its_full_rate_again_is_reported_once():
    news, counters, pace = WriteNews("orders"), WriteCounters(), ShardPace(ProducerSettings(), 0)
    pace.factor = 0.5
    news.throttled(pace, "shardId-1", 1_000)
    news.throttled(pace, "shardId-1", 2_000)
    assert list(news.call_succeeded(counters, 3_000)) == []
    pace.factor = 1.0
    assert list(news.call_succeeded(counters, 9_000)) == [
        WriteUnthrottled(stream="orders", shard_id="shardId-1", seconds=8.0)
    ]
    assert list(news.call_succeeded(counters, 9_500)) == []


def test_a_listing_after_a_failed_one_is_reported_once():
    news = WriteNews("orders")
    assert list(news.listed()) == []
    news.listing_failed()
    assert list(news.listed()) == [ListingRecovered(stream="orders")]
    assert list(news.listed()) == []

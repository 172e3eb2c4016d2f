"""What CloudWatch gets: each count once, also when a call fails between two parts or a shard counts from zero again."""

from anabranch.measures import TimeBuckets
from anabranch.metrics.catalogue import Measurement, Metric, Summary
from anabranch.metrics.cloudwatch import DATA_PER_CALL_MAX, CloudWatchThread, batches_of, namespace_of
from anabranch.metrics.sources import Source

COUNTER = Metric("RecordsProcessed", "counter", "Count", "")
GAUGE = Metric("ActiveShards", "gauge", "Count", "")
TIMES = Metric("ProcessingLatency", "times", "Milliseconds", "")
SUMMARY = Metric("Confidence", "summary", "None", "", is_own=True)


def of_shard(number, value, metric=COUNTER):
    return Measurement(metric=metric, value=value, labels={"app": "a", "stream": "s", "shard_id": f"shard-{number}"})


def sent_values(measured, sent):
    return [(datum.name, datum.values, datum.counts) for data, _ in batches_of(measured, sent, {}) for datum in data]


def test_only_what_was_counted_since_the_last_export_is_sent():
    one = of_shard(0, 10)
    assert sent_values([one], {one.key: 7}) == [("RecordsProcessed", [3.0], [1.0])]
    times = of_shard(0, TimeBuckets([0, 2, 1, *[0] * 11], 9), TIMES)
    assert sent_values([times], {times.key: TimeBuckets([0, 1, 0, *[0] * 11], 2)}) == [
        ("ProcessingLatency", [1.5, 3.5], [1.0, 1.0])
    ]
    confidence = of_shard(0, Summary(3, 1.5, {0.5: 3}), SUMMARY)
    assert sent_values([confidence], {confidence.key: Summary(1, 0.5, {0.5: 1})}) == [("Confidence", [0.5], [2.0])]


def test_a_shard_that_was_taken_again_counts_from_zero_and_nothing_is_negative():
    one = of_shard(0, 4)
    assert sent_values([one], {one.key: 100}) == [("RecordsProcessed", [4.0], [1.0])]


def test_a_counter_that_never_counted_is_not_sent_and_a_gauge_of_zero_is():
    assert sent_values([of_shard(0, 0), of_shard(0, 0, GAUGE)], {}) == [("ActiveShards", [0.0], [1.0])]


def test_many_metrics_are_sent_in_parts_and_a_part_that_arrived_is_not_sent_again():
    measured = [of_shard(number, 1) for number in range(2 * DATA_PER_CALL_MAX + 1)]
    arrived, fails_at = [], [2]

    class Flaky(CloudWatchThread):
        def _send(self, source, namespace, data):
            assert len(data) <= DATA_PER_CALL_MAX
            fails_at[0] -= 1
            if fails_at[0] == 0:
                raise OSError("throttled")
            arrived.extend(data)

    told = []
    source = Source("a", lambda level: measured, told.append, namespace="A")
    source.read = lambda level: measured
    exporter = Flaky(namespace=None, level="detailed", interval=60, dimensions=None)
    exporter._export(source)
    assert len(arrived) == DATA_PER_CALL_MAX
    measured[0] = of_shard(0, 5)
    exporter._export(source)
    values = {}
    for datum in arrived:
        values.setdefault(datum.dimensions["ShardId"], []).extend(datum.values)
    assert sum(sum(found) for found in values.values()) == len(measured) + 4
    assert values["shard-0"] == [1.0, 4.0]
    assert [type(event).__name__ for event in told] == ["ExporterFailed", "ExporterRecovered"]


def test_several_streams_have_their_name_as_a_dimension():
    other = Measurement(metric=COUNTER, value=1, labels={"app": "a", "stream": "t", "shard_id": "shard-0"})
    [(data, _)] = batches_of([of_shard(0, 1), other], {}, {"Stage": "test"})
    assert [dict(datum.dimensions) for datum in data] == [
        {"Stage": "test", "StreamName": stream, "ShardId": "shard-0"} for stream in ("s", "t")
    ]
    [(data, _)] = batches_of([of_shard(0, 1)], {}, {})
    assert [dict(datum.dimensions) for datum in data] == [{"ShardId": "shard-0"}]


def test_a_namespace_has_only_what_cloudwatch_allows():
    source = Source("a", lambda level: [], lambda event: None, namespace="Anabranch/b\u00fcro:1*")
    assert namespace_of(source) == "Anabranch/b_ro_1_"

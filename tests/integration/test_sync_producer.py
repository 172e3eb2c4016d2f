"""The blocking producer over real sockets: threads, processes, forks, exits."""

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest

from anabranch._daemon_threads import DaemonThreads
from anabranch._wire.aggregate import open_aggregate
from anabranch.errors import BufferFull, ConfigurationError, DeliveryFailed, ProducerError, UsageError
from anabranch.sync_producer import SyncProducer
from patience import PATIENCE


@pytest.fixture
def kinesis(local_kinesis):
    client = boto3.client("kinesis")
    client.create_stream(StreamName="orders", ShardCount=2)
    return client


def records(client, stream="orders"):
    """(partition key, data) as a consumer sees them, shard by shard."""
    found = []
    for shard in client.list_shards(StreamName=stream)["Shards"]:
        iterator = client.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        for record in client.get_records(ShardIterator=iterator)["Records"]:
            aggregate = open_aggregate(record["Data"])
            if aggregate is None:
                found.append((record["PartitionKey"], record["Data"]))
            else:
                found += [(key, data) for key, _, data in aggregate.sub_records()]
    return found


def test_after_a_thread_could_not_start_the_next_put_tries_again(kinesis, monkeypatch):
    started, start = [], DaemonThreads.start

    def start_the_second_time(self):
        started.append(self)
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(DaemonThreads, "start", start_the_second_time)
    with SyncProducer("orders") as producer:
        with pytest.raises(ProducerError, match="can't start new thread"):
            producer.put_nowait(b"x", "key")
        assert producer.put_and_wait(b"x", "key").delivered
    assert records(kinesis) == [("key", b"x")]


def test_a_record_is_put_and_its_outcome_is_reported(kinesis):
    with SyncProducer("orders") as producer:
        assert producer.flush().complete
        delivery = producer.put(b"hello", "k", explicit_hash_key="7")
        result = delivery.result(PATIENCE)
        assert delivery.done()
        assert result.delivered
        assert result.explicit_hash_key == "7"
        assert delivery.result().sequence_number == result.sequence_number
        assert producer.put_and_wait(b"again", "k").delivered
        assert producer.put_nowait(b"more", "k", stream="orders").result().delivered
    assert delivery.result().delivered
    assert sorted(records(kinesis)) == [("k", b"again"), ("k", b"hello"), ("k", b"more")]


def test_threads_share_one_producer_and_each_keeps_its_order(kinesis):
    with SyncProducer("orders", buffer_bytes=1 << 20) as producer:

        def work(name):
            return producer.put_many([(f"key-{name}", b"%d" % number * 50) for number in range(400)])

        with ThreadPoolExecutor(8) as pool:
            deliveries = [delivery for group in pool.map(work, range(8)) for delivery in group]
        assert producer.flush(deadline=30).complete
        assert all(delivery.done() for delivery in deliveries)
        assert all(delivery.result().delivered for delivery in deliveries)
    stored = records(kinesis)
    for name in range(8):
        mine = [data for key, data in stored if key == f"key-{name}"]
        assert mine == [b"%d" % number * 50 for number in range(400)]


def test_a_missing_stream_is_an_outcome_that_flush_or_the_delivery_raises(kinesis):
    producer = SyncProducer("not-there")
    result = producer.put(b"1", "k").result()
    assert result.error.startswith("ResourceNotFoundException")
    with pytest.raises(DeliveryFailed, match="'l' was not delivered"):
        producer.put_and_wait(b"2", "l")
    unseen = producer.put(b"3", "m")
    with pytest.raises(DeliveryFailed) as failed:
        producer.flush()
    assert failed.value.result.data == b"3"
    producer.put(b"4", "n")
    with pytest.raises(DeliveryFailed):
        producer.close()
    assert not unseen.result().delivered
    assert producer.close().complete
    with pytest.raises(UsageError, match="closed"):
        producer.put(b"5", "k")


def test_a_rejected_value_is_raised_by_the_delivery_or_by_flush(kinesis):
    with SyncProducer("orders") as producer:

        def put_until_the_stream_is_described():
            while True:
                producer.put(b"x" * (1 << 20), "k").result()

        with pytest.raises(ValueError, match="at most 1048576"):
            put_until_the_stream_is_described()
        assert producer.flush().complete
        producer.put(b"x" * (1 << 20), "k")
        with pytest.raises(DeliveryFailed, match="Refused: the record has 1048577 bytes"):
            producer.flush()
        with pytest.raises(ValueError, match="raise buffer_bytes"):
            producer.put(b"x" * (65 << 20), "k")


def test_wrong_keys_streams_and_options_are_refused_at_once(kinesis):
    with pytest.raises(ConfigurationError, match="order"):
        SyncProducer("orders", order="shard")
    with SyncProducer() as producer:
        with pytest.raises(UsageError, match="no stream: pass one"):
            producer.put(b"x", "k")
        with pytest.raises(ValueError, match="partition key"):
            producer.put(b"x", "", stream="orders")
        with pytest.raises(ValueError, match="stream's name"):
            producer.put(b"x", "k", stream="no such name!")


def test_the_wait_for_room_is_bounded(local_kinesis, kinesis):
    local_kinesis.faults.on("PutRecords").delay(0.5)
    with SyncProducer("orders", buffer_bytes=1 << 20) as producer:
        for _ in range(3):
            producer.put(b"x" * 900_000, "k", timeout=30)
        with pytest.raises(BufferFull):
            producer.put_nowait(b"x" * 900_000, "k")
        report = producer.flush(deadline=0.1)
        assert not report.complete
        assert report.pending_count >= 2
        local_kinesis.faults.clear()


def test_leaving_by_an_error_keeps_that_error(kinesis):
    def body():
        with SyncProducer("not-there") as producer:
            producer.put(b"x", "k")
            raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        body()
    assert "undelivered" in error.value.__notes__[0]


def test_a_full_buffer_of_unseen_failures_is_raised_by_a_later_put(kinesis):
    producer = SyncProducer("not-there", buffer_bytes=1 << 20)
    failed = []
    for _ in range(50):
        try:
            producer.put(b"x" * 300_000, "k")
        except DeliveryFailed as error:
            failed += error.results
            break
    assert failed
    with pytest.raises(DeliveryFailed):
        producer.close()


SCRIPT = """
    import os, sys
    from anabranch.sync_producer import SyncProducer
    from anabranch.errors import UsageError
    producer = SyncProducer("orders")
"""


def run(script, *, code=0):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT) + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


def test_a_script_that_ends_without_close_still_delivers(kinesis):
    run("""
        producer.put_and_wait(b"1", "k")
        producer.put(b"2", "k")
    """)
    assert records(kinesis) == [("k", b"1"), ("k", b"2")]


def test_a_forked_child_starts_its_own_thread(kinesis):
    run("""
        producer.put_and_wait(b"parent", "k")
        child = os.fork()
        producer.put_and_wait(b"either", "k")
        producer.close()
        if child:
            sys.exit(os.waitpid(child, 0)[1])
        os._exit(0)
    """)
    assert sorted(records(kinesis)) == [("k", b"either"), ("k", b"either"), ("k", b"parent")]


def test_a_child_forked_with_records_on_their_way_refuses_clearly(local_kinesis, kinesis):
    local_kinesis.faults.on("PutRecords").delay(1.0)
    output = run("""
        producer.put(b"parent", "k")
        child = os.fork()
        if child:
            producer.close()
            sys.exit(os.waitpid(child, 0)[1])
        try:
            producer.put(b"child", "k")
        except UsageError as error:
            print(error, flush=True)
        os._exit(0)
    """)
    assert "call flush() before the fork" in output
    assert records(kinesis) == [("k", b"parent")]


def test_a_loop_that_cannot_be_started_is_reported_and_the_next_use_tries_again(kinesis, monkeypatch):
    producer = SyncProducer("orders")
    with monkeypatch.context() as patch:
        patch.setattr("asyncio.new_event_loop", _no_more_files)
        patch.setattr("asyncio.runners.events.new_event_loop", _no_more_files)
        with pytest.raises(ProducerError, match="Too many open files"):
            producer.put(b"hello", "k")
    with producer:
        assert producer.put(b"hello", "k").result(PATIENCE).delivered


def _no_more_files():
    raise OSError(24, "Too many open files")


def test_nothing_is_started_before_the_first_use(kinesis):
    before = threading.active_count()
    producer = SyncProducer("orders")
    assert threading.active_count() == before
    assert producer.close().complete

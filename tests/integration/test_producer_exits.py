"""Programs that end without closing their producer: records are delivered, or the log says how many were not."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading

import boto3
import pytest

from anabranch._engine.writing.write_thread import WriteThread
from anabranch._wire.aggregate import open_aggregate
from anabranch.config import ProducerSettings
from anabranch.errors import ConfigurationError, ProducerError
from anabranch.sync_producer import SyncProducer
from patience import PATIENCE, wait_for

from services import free_port


@pytest.fixture
def kinesis(local_kinesis):
    client = boto3.client("kinesis")
    client.create_stream(StreamName="orders", ShardCount=2)
    return client


def count_records(client):
    count = 0
    for shard in client.list_shards(StreamName="orders")["Shards"]:
        iterator = client.get_shard_iterator(
            StreamName="orders", ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while True:
            page = client.get_records(ShardIterator=iterator)
            for record in page["Records"]:
                aggregate = open_aggregate(record["Data"])
                count += 1 if aggregate is None else len(list(aggregate.sub_records()))
            if not page["Records"]:
                break
            iterator = page["NextShardIterator"]
    return count


def run(script, *, code=0, **variables):
    """What the script wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", "import anabranch\n" + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=PATIENCE, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stderr


# the blocking producer


def test_a_producer_that_goes_out_of_scope_delivers(kinesis):
    errors = run("""
        def work():
            producer = anabranch.SyncProducer("orders")
            for number in range(2_000):
                producer.put(b"%d" % number, f"k{number % 10}")
        work()
    """)
    assert errors == ""
    assert count_records(kinesis) == 2_000


def test_a_program_that_ends_before_the_first_connection_delivers(kinesis):
    errors = run("""
        producer = anabranch.SyncProducer("orders")
        for number in range(100):
            producer.put(b"%d" % number, "k")
    """)
    assert errors == ""
    assert count_records(kinesis) == 100


def test_over_a_host_name_too(local_kinesis, kinesis):
    url = local_kinesis.endpoint_url.replace("127.0.0.1", "localhost")
    errors = run('anabranch.SyncProducer("orders").put(b"x", "k")', AWS_ENDPOINT_URL=url, AWS_ENDPOINT_URL_KINESIS=url)
    assert errors == ""
    assert count_records(kinesis) == 1


@pytest.mark.parametrize("end, code", [("sys.exit(3)", 3), ("raise KeyError('mine')", 1)])
def test_the_exit_code_stays(end, code, kinesis):
    run(
        f"""
        import sys
        anabranch.SyncProducer("orders").put(b"x", "k")
        {end}
        """,
        code=code,
    )
    assert count_records(kinesis) == 1


def test_threads_that_outlive_the_main_thread_may_continue_writing(kinesis):
    errors = run("""
        import threading, time
        producer = anabranch.SyncProducer("orders")
        def work():
            threading.main_thread().join()
            for number in range(50):
                producer.put(b"%d" % number, "k")
                time.sleep(0.01)
        producer.put(b"first", "k")
        threading.Thread(target=work).start()
    """)
    assert errors == ""
    assert count_records(kinesis) == 51


def test_a_hook_at_exit_may_still_put(kinesis):
    errors = run("""
        import atexit
        producer = anabranch.SyncProducer("orders")
        atexit.register(lambda: producer.put(b"last", "k"))
        producer.put(b"first", "k")
        atexit.register(producer.flush)
    """)
    assert errors == ""
    assert count_records(kinesis) == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_delivers(method, kinesis, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        import anabranch
        producer = anabranch.SyncProducer("orders")
        def work():
            for number in range(100):
                producer.put(b"%d" % number, "k")
        if __name__ == "__main__":
            child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
            child.start()
            child.join()
            sys.exit(child.exitcode)
    """)
    )
    done = subprocess.run(
        [sys.executable, str(script), method], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert count_records(kinesis) == 100


@pytest.fixture
def deaf_endpoint():
    """Connections are made, and nothing is ever answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_endpoint():
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("endpoint", ["deaf_endpoint", "closed_endpoint"])
def test_where_the_endpoint_is_down_the_program_ends_in_time_and_says_what_was_not_delivered(
    endpoint, request, local_kinesis
):
    """In time: `run` does not wait as long as the delivery timeout, two minutes."""
    url = request.getfixturevalue(endpoint)
    errors = run(
        """
        def work():
            producer = anabranch.SyncProducer("orders", settings=anabranch.ProducerSettings(exit_timeout=1.0))
            for number in range(30):
                producer.put(b"%d" % number, "k")
            return producer
        kept = work()
        work()
        """,
        AWS_ENDPOINT_URL=url,
        AWS_ENDPOINT_URL_KINESIS=url,
    )
    assert errors.count("30 records were not delivered: ") == 2, errors
    assert len(errors.splitlines()) < 20, errors


def test_a_hook_that_never_returns_does_not_keep_the_program(kinesis):
    errors = run("""
        import time
        producer = anabranch.SyncProducer(
            "missing", on_undelivered=lambda _: time.sleep(1_000), settings=anabranch.ProducerSettings(exit_timeout=0.2)
        )
        producer.put(b"x", "k")
        producer.put(b"y", "l")
    """)
    assert "did not stop within 0.2 s" in errors


def test_what_a_dropped_producer_could_not_deliver_is_logged_while_the_program_continues(kinesis, caplog):
    SyncProducer("missing").put(b"x", "k")
    wait_for(lambda: "1 records were not delivered" in caplog.text, "the log")
    assert "ResourceNotFoundException" in caplog.text
    wait_for(
        lambda: not any("anabranch-producer" in thread.name for thread in threading.enumerate()),
        "the end of the thread",
    )


def test_the_time_at_exit_is_ten_seconds_by_default():
    assert ProducerSettings().exit_timeout == 10
    with pytest.raises(ConfigurationError, match="exit_timeout"):
        ProducerSettings(exit_timeout=-1)


# a thread that fails


@pytest.mark.parametrize("step", ["_take", "_next", "_put", "_flush", "_until_taken"])
def test_an_unexpected_error_in_the_thread_leaves_no_caller_waiting(step, kinesis, monkeypatch):
    producer = SyncProducer("orders", buffer_bytes=1 << 20)
    producer.put_and_wait(b"first", "k")

    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(WriteThread, step, broken)
    ends = []

    def work():
        for _ in range(3):
            try:
                ends.append(producer.put(b"x" * 500_000, "k").result())
            except (ProducerError, ZeroDivisionError) as error:
                ends.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ends) == 9
    for end in (producer.flush, producer.close):
        with contextlib.suppress(ProducerError, ZeroDivisionError):
            end()
    wait_for(
        lambda: not any("anabranch-producer" in thread.name for thread in threading.enumerate()),
        "the end of the thread",
    )


# the asynchronous producer


def test_a_producer_that_was_never_closed_says_so_when_its_loop_ends(kinesis):
    errors = run("""
        import asyncio
        async def main():
            producer = anabranch.Producer("orders")
            for number in range(100):
                producer.put_nowait(b"%d" % number, "k")
        asyncio.run(main())
    """)
    assert "100 records" in errors
    assert "close" in errors


def test_a_producer_that_was_never_closed_says_so_when_the_interpreter_ends(kinesis):
    errors = run("""
        import asyncio
        async def main():
            producer = anabranch.Producer("orders")
            for number in range(100):
                producer.put_nowait(b"%d" % number, "k")
        asyncio.new_event_loop().run_until_complete(main())
    """)
    assert "100 records" in errors
    assert errors.count("records") == 1


def test_an_unseen_failure_is_reported_when_the_loop_ends(kinesis):
    errors = run("""
        import asyncio
        async def main():
            producer = anabranch.Producer("missing")
            delivery = await producer.put(b"x", "k")
            while not delivery.done():
                await asyncio.sleep(0.01)
        asyncio.run(main())
    """)
    assert "1 record not delivered" in errors


def test_a_close_that_is_cut_off_says_what_was_not_delivered(kinesis, deaf_endpoint):
    errors = run(
        """
        import asyncio
        async def main():
            async with anabranch.Producer("orders") as producer:
                for number in range(100):
                    producer.put_nowait(b"%d" % number, "k")
        try:
            asyncio.run(asyncio.wait_for(main(), 1.0))
        except TimeoutError:
            pass
        """,
        AWS_ENDPOINT_URL=deaf_endpoint,
        AWS_ENDPOINT_URL_KINESIS=deaf_endpoint,
    )
    assert "100 records" in errors


def test_nothing_is_said_where_everything_was_delivered(kinesis):
    errors = run("""
        import asyncio
        async def main():
            producer = anabranch.Producer("orders")
            await producer.put_and_wait(b"x", "k")
        asyncio.run(main())
        asyncio.new_event_loop().run_until_complete(main())
    """)
    assert "records" not in errors
    assert count_records(kinesis) == 2

"""A consumer and its dead letters on real servers: the local Kinesis, moto's SQS and S3, files."""

import asyncio
import itertools

import pytest
from msgspec.structs import replace

from anabranch import Consumer, ConsumerSettings, DeadLetter, DeadLetters, PollingSettings, Producer, Retry
from anabranch._aws.kinesis_client import open_kinesis
from anabranch._model.streams import StreamName
from anabranch.dead_letters import LetterFilter
from anabranch.errors import ConfigurationError, DeadLetterError, UsageError
from anabranch.events import DeadLettersWarning, RecordDeadLettered
from anabranch.local import LocalKinesis
from letter_samples import AWS_NAMES, moto

from stream_world import until

NUMBERS = itertools.count()
SETTINGS = ConsumerSettings(polling=PollingSettings(idle_interval=0.2))
DATA = [b"poison" if number in {3, 8} else b"order %d" % number for number in range(12)]


@pytest.fixture(scope="module")
def server():
    with moto() as server:
        yield server


@pytest.fixture(autouse=True)
def _environment(monkeypatch, server):
    for name, value in {**AWS_NAMES, **server.environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("anabranch.dead_letters.sqs.WAIT_SECONDS", 0)


def letters_of(url):
    async def main():
        async with DeadLetters(url) as box:
            return [letter async for letter in box.letters()]

    return main()


async def fill(data=DATA):
    async with Producer("orders") as producer:
        for number, one in enumerate(data):
            await producer.put(one, f"key-{number % 4}")


class Handler:
    def __init__(self):
        self.handled = []
        self.calls = 0

    async def __call__(self, record):
        self.calls += 1
        if record.data.startswith(b"poison"):
            raise ValueError("bad order")
        self.handled.append(record.data)


def consumer(then, events=None, **options):
    return Consumer(
        "orders", app="billing", until="tip", order="key", settings=SETTINGS, leases="memory://",
        on_failure=Retry(attempts=2, backoff=0.0, then=then), on_event=None if events is None else events.append,
        **options,
    )  # fmt: skip


def on_kinesis(monkeypatch, work, **streams):
    async def main():
        async with LocalKinesis(create={"orders": 1, **streams}) as local:
            for name, value in local.environment().items():
                if "ACCESS" not in name:
                    monkeypatch.setenv(name, value)
            await work()

    asyncio.run(main())


@pytest.mark.parametrize(
    "kind", ["sqlite", "sqs", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("s3", "fifo"))]
)
def test_records_that_keep_failing_are_in_the_destination_and_all_others_are_handled(
    kind, server, tmp_path, monkeypatch
):
    name = f"real-{next(NUMBERS)}"
    url = {
        "sqlite": lambda: f"sqlite://{tmp_path}/letters.db",
        "s3": lambda: server.make_bucket(name),
        "sqs": lambda: server.make_queue(name),
        "fifo": lambda: server.make_queue(f"{name}.fifo"),
    }[kind]()

    async def work():
        await fill()
        handler = Handler()
        report = await consumer(DeadLetter(url)).run(handler)
        assert report.clean
        assert (len(handler.handled), handler.calls) == (10, 14)
        one, two = await letters_of(url)
        assert (one.payload, one.partition_key, two.partition_key) == (b"poison", "key-3", "key-0")
        assert (one.app, one.stream, one.error_type, one.message) == ("billing", "orders", "ValueError", "bad order")
        assert (one.attempts, len(one.attempted_seconds), one.recovered) == (2, 2, False)
        assert "bad order" in one.stack
        assert one.fingerprint == two.fingerprint
        async with DeadLetters(url) as box:
            assert (await box.redrive(fixed)).delivered == 2
        assert await letters_of(url) == []

    async def fixed(record):
        assert record.data == b"poison"

    on_kinesis(monkeypatch, work)


def test_without_a_url_the_letters_are_beside_the_leases(tmp_path, monkeypatch):
    async def work():
        await fill()
        reader = Consumer(
            "orders", app="billing", until="tip", settings=SETTINGS, leases=f"sqlite://{tmp_path}/leases.db",
            on_failure=Retry(attempts=1, then=DeadLetter(redact=lambda letter: replace(letter, payload=None))),
        )  # fmt: skip
        await reader.run(Handler())
        found = await letters_of(f"sqlite://{tmp_path}/billing.letters.db")
        assert [letter.payload for letter in found] == [None, None]

    on_kinesis(monkeypatch, work)


def test_a_queue_that_goes_away_is_the_reason_and_the_letter_is_written_when_it_is_back(server, monkeypatch):
    name = f"real-{next(NUMBERS)}"
    url = server.make_queue(name)
    sqs = server.client("sqs")

    async def work():
        handler, events = Handler(), []
        reader = Consumer(
            "orders", app="billing", start="trim_horizon", order="key", settings=SETTINGS, leases="memory://",
            on_failure=Retry(attempts=1, then=DeadLetter(url)), on_event=events.append,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            run = group.create_task(reader.run(handler))
            await until(lambda: reader.status().shards, "the shards")
            queue = sqs.get_queue_url(QueueName=name)["QueueUrl"]
            sqs.delete_queue(QueueUrl=queue)
            await fill()
            await until(lambda: any(shard.reason is not None for shard in reader.status().shards), "the reason")
            (reason,) = [shard.reason for shard in reader.status().shards if shard.reason is not None]
            assert reason.code == "letter-not-written"
            assert f"sqs://{name} does not exist: create it" in str(reason)
            await until(lambda: len(handler.handled) >= 8, "the other keys")  # other keys go on
            server.make_queue(name)
            await until(lambda: sum(isinstance(event, RecordDeadLettered) for event in events) == 2, "both letters")
            await until(lambda: len(handler.handled) == 10, "all records")
            await reader.stop()
            assert (await run).clean
        assert len(await letters_of(url)) == 2

    on_kinesis(monkeypatch, work)


def test_a_destination_that_cannot_be_used_is_an_error_at_the_start(server, monkeypatch):
    async def work():
        with pytest.raises(DeadLetterError, match="sqs://nowhere does not exist: create it"):
            await consumer(DeadLetter("sqs://nowhere")).run(Handler())

    on_kinesis(monkeypatch, work)


def test_a_short_retention_is_reported_at_the_start(server, monkeypatch):
    url = server.make_queue(f"real-{next(NUMBERS)}", MessageRetentionPeriod="3600")

    async def work():
        events = []
        await consumer(DeadLetter(url), events).run(Handler())
        (warning,) = [event for event in events if isinstance(event, DeadLettersWarning)]
        assert "deletes letters after 1 h" in warning.warning

    on_kinesis(monkeypatch, work)


def test_a_letter_that_is_too_large_waits_with_that_reason_or_goes_to_the_overflow(server, tmp_path, monkeypatch):
    url = server.make_queue(f"real-{next(NUMBERS)}", MaximumMessageSize="4096")

    async def work():
        await fill([b"poison" + bytes(8_000), b"order"])
        reader = Consumer(
            "orders", app="billing", start="trim_horizon", settings=SETTINGS, leases="memory://",
            on_failure=Retry(attempts=1, then=DeadLetter(url)),
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            run = group.create_task(reader.run(Handler()))
            await until(lambda: any(shard.reason is not None for shard in reader.status().shards), "the reason")
            (reason,) = [shard.reason for shard in reader.status().shards]
            assert "takes 4,096: set DeadLetter(overflow=" in str(reason)
            await reader.stop()
            await run
        handler = Handler()
        await consumer(DeadLetter(url, overflow=f"file://{tmp_path}")).run(handler)
        assert handler.handled == [b"order"]
        async with DeadLetters(url) as box:
            (letter,) = [letter async for letter in box.letters(LetterFilter(key="key-0"))]
            assert letter.payload is None
            assert (await box.get(letter.idempotency_key)).payload == b"poison" + bytes(8_000)

    on_kinesis(monkeypatch, work)


def test_a_start_that_fails_at_the_dead_letters_leaves_nothing_open(monkeypatch):
    opened = []

    async def open_and_remember(*arguments, **options):
        opened.append(await open_kinesis(*arguments, **options))
        return opened[-1]

    async def main():
        async with LocalKinesis(create={"orders": 1}) as local:
            for name, value in local.environment().items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
            monkeypatch.setattr("anabranch.consumer.open_kinesis", open_and_remember)
            with pytest.raises(ConfigurationError, match="the dead letters of application 'billing'"):
                await consumer(DeadLetter()).run(Handler())
            with pytest.raises(UsageError, match="this client is closed"):
                await opened[0].describe_stream_summary(StreamName("orders"))

    asyncio.run(main())

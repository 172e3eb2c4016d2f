"""A redrive delivers each letter, in key order, whatever stops it; what fails again is not lost."""

import asyncio
import itertools
import threading

import pytest
from msgspec.structs import replace

from anabranch import Consumer, DeadLetter, DeadLetters, Retry
from anabranch.dead_letters import LetterFilter
from anabranch.dead_letters.opening import open_destination
from anabranch.errors import ConfigurationError, DeadLetterError
from anabranch.letters import decode_letter, stream_order
from anabranch.local import LocalKinesis
from letter_samples import AWS_NAMES, a_letter, moto
from patience import PATIENCE

NUMBERS = itertools.count()
QUICK = Retry(attempts=3, backoff=0.0, backoff_max=0.0)


@pytest.fixture(scope="module")
def server():
    with moto() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, value in AWS_NAMES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("anabranch.dead_letters.sqs.WAIT_SECONDS", 0)
    monkeypatch.setattr("anabranch.dead_letters.sqs.HOLD_SECONDS", 1)  # seconds until a killed redrive's letters show


def new_box(kind, tmp_path, server):
    number = next(NUMBERS)
    if kind == "sqlite":
        return f"sqlite://{tmp_path}/letters.db"
    if kind == "s3":
        return server.make_bucket(f"redriven-{number}")
    return server.make_queue(f"redriven-{number}" + (".fifo" if kind == "fifo" else ""))


@pytest.fixture(params=["sqlite", "sqs", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("s3", "fifo"))])
def url(request, tmp_path, server):
    return new_box(request.param, tmp_path, server)


@pytest.fixture(params=["sqlite", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("s3", "sqs", "fifo"))])
def crash_url(request, tmp_path, server):
    return new_box(request.param, tmp_path, server)


@pytest.fixture
def file_url(tmp_path):
    return f"sqlite://{tmp_path}/letters.db"


@pytest.fixture
def review(tmp_path):
    return f"sqlite://{tmp_path}/review.db"


async def fill(url, letters, **options):
    writer = open_destination(url, app="billing", environ={}, **options)
    for letter in letters:
        await writer.write(letter)
    await writer.close()


async def left(url):
    async with DeadLetters(url) as box:
        return [letter async for letter in box.letters()]


def keyed(count):
    """Letters of three keys."""
    return [a_letter(number, key=f"key-{number % 3}") for number in range(count)]


class Handler:
    """Notes what it was called with; fails for some."""

    def __init__(self, fails=lambda record: False):
        self.calls = []
        self.fails = fails

    async def __call__(self, record):
        self.calls.append(record)
        await asyncio.sleep(0)
        if self.fails(record):
            raise KeyError(record.sequence_number)

    def numbers(self, key=None):
        return [int(one.sequence_number) for one in self.calls if key is None or one.partition_key == key]


def test_every_letter_is_handled_in_the_order_of_its_key_and_removed(url):
    async def main():
        await fill(url, reversed(keyed(12)) if ".fifo" not in url else keyed(12))
        handler = Handler()
        async with DeadLetters(url) as letters:
            report = await letters.redrive(handler, policy=QUICK)
        assert (report.matched, report.delivered, report.is_complete) == (12, 12, True)
        for number in range(3):
            assert handler.numbers(f"key-{number}") == list(range(number, 12, 3))
        assert handler.calls[0].data == b"payload %d" % int(handler.calls[0].sequence_number)
        assert await left(url) == []

    asyncio.run(main())


def test_what_fails_again_goes_to_review_and_the_key_continues(url, review):
    async def main():
        await fill(url, keyed(6))
        handler = Handler(lambda record: record.sequence_number == "1")
        async with DeadLetters(url) as letters:
            report = await letters.redrive(handler, policy=QUICK, review=review)
        assert (report.delivered, report.reviewed, report.last_error) == (5, 1, "KeyError: '1'")
        assert handler.numbers("key-1") == [1, 1, 1, 4]
        assert await left(url) == []
        (letter,) = await left(review)
        assert (letter.idempotency_key, letter.payload) == (a_letter(1).idempotency_key, b"payload 1")
        assert (letter.attempts, letter.redrive_count, letter.error_type) == (6, 1, "KeyError")

    asyncio.run(main())


def test_without_a_review_destination_a_failed_letter_stays_and_holds_its_key_back(url):
    async def main():
        await fill(url, keyed(6))
        handler = Handler(lambda record: record.sequence_number == "1")
        async with DeadLetters(url) as letters:
            report = await letters.redrive(handler, policy=QUICK, concurrency=1)
        assert (report.delivered, report.failed, report.held_back) == (4, 1, 1)
        assert 4 not in handler.numbers()
        stayed = {int(one.sequence_number): one.redrive_count for one in await left(url)}
        assert stayed == {1: 0 if ".fifo" in url else 1, 4: 0}  # not counted in a FIFO queue
        again = Handler()
        async with DeadLetters(url) as letters:
            assert (await letters.redrive(again, policy=QUICK)).is_complete
        assert again.numbers() == [1, 4]

    asyncio.run(main())


@pytest.mark.parametrize("count", [3, 15])  # a queue answers with ten at most
def test_a_failed_letter_keeps_its_place_in_a_fifo_queue(count, tmp_path, server):
    url = new_box("fifo", tmp_path, server)

    async def main():
        await fill(url, [a_letter(number) for number in range(count)])
        handler = Handler(lambda record: record.sequence_number == "1")
        async with DeadLetters(url) as letters:
            report = await letters.redrive(handler, policy=QUICK)
        read = min(count, 10)
        assert (report.matched, report.delivered, report.failed, report.held_back) == (read, 1, 1, read - 2)
        assert handler.numbers() == [0, 1, 1, 1]
        again = Handler()
        async with DeadLetters(url) as letters:
            assert (await letters.redrive(again, policy=QUICK)).is_complete
        assert again.numbers() == list(range(1, count))
        assert await left(url) == []

    asyncio.run(main())


def test_more_letters_than_fit_a_page_or_a_round_are_all_redriven_in_order(url, monkeypatch):
    for name in ("sqlite.PAGE_ROWS", "s3.PAGE", "sqs.ROUND_LETTERS_MAX"):
        monkeypatch.setattr(f"anabranch.dead_letters.{name}", 5)

    async def main():
        await fill(url, keyed(23))
        async with DeadLetters(url) as letters:
            assert await letters.count() == 23
            handler = Handler()
            assert (await letters.redrive(handler, policy=QUICK)).delivered == 23
        assert sorted(handler.numbers()) == list(range(23))
        if not url.startswith("sqs://") or ".fifo" in url:
            for number in range(3):
                assert handler.numbers(f"key-{number}") == list(range(number, 23, 3))

    asyncio.run(main())


@pytest.mark.long
def test_a_letter_stays_hidden_while_its_handler_runs(server, monkeypatch):
    monkeypatch.setattr("anabranch.dead_letters.sqs.HOLD_SECONDS", 4)
    monkeypatch.setattr("anabranch.dead_letters.redrive.HOLD_SECONDS", 1.5)
    url = server.make_queue(f"redriven-{next(NUMBERS)}")

    async def main():
        await fill(url, keyed(1))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(record):
            begun.set()
            await go_on.wait()

        async with DeadLetters(url) as box, asyncio.TaskGroup() as group:
            run = group.create_task(box.redrive(slow))
            await begun.wait()
            for _ in range(10):
                await asyncio.sleep(0.5)
                assert await left(url) == []
            go_on.set()
        assert (await run).delivered == 1

    asyncio.run(main())


def test_reading_a_queue_ends_even_if_its_messages_come_back_at_once(server, monkeypatch):
    monkeypatch.setattr("anabranch.dead_letters.sqs.HOLD_SECONDS", 0)
    url = server.make_queue(f"redriven-{next(NUMBERS)}")

    async def main():
        await fill(url, keyed(5))
        async with asyncio.timeout(PATIENCE):
            assert await left(url) == keyed(5)

    asyncio.run(main())


@pytest.mark.long
def test_reading_a_queue_keeps_its_letters_hidden_however_long_it_takes(server, monkeypatch):
    monkeypatch.setattr("anabranch.dead_letters.sqs.HOLD_SECONDS", 4)
    url = server.make_queue(f"redriven-{next(NUMBERS)}")

    async def main():
        await fill(url, keyed(9))
        async with DeadLetters(url) as box:
            async for _ in box.letters():
                await asyncio.sleep(0.5)
                assert await left(url) == []

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sqlite", "s3", "sqs"])
def test_reading_meanwhile_does_not_let_go_what_a_redrive_of_the_same_object_holds(kind, tmp_path, server, monkeypatch):
    monkeypatch.setattr("anabranch.dead_letters.sqs.HOLD_SECONDS", 60)
    url = new_box(kind, tmp_path, server)

    async def main():
        await fill(url, keyed(1))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(record):
            begun.set()
            await go_on.wait()

        async with DeadLetters(url) as box, asyncio.TaskGroup() as group:
            run = group.create_task(box.redrive(slow))
            await begun.wait()
            hidden = kind == "sqs"
            assert len(await box.groups()) == (0 if hidden else 1)
            assert len(await left(url)) == (0 if hidden else 1)
            if not hidden:
                async with DeadLetters(url) as other:
                    with pytest.raises(DeadLetterError, match="is being redriven by"):
                        await other.redrive(slow)
            go_on.set()
        assert (await run).delivered == 1
        assert await left(url) == []

    asyncio.run(main())


async def steal_lock(url):
    """As if this process had slept until its hold expired."""
    async with DeadLetters(url) as other:
        if url.startswith("sqlite"):
            stolen = "UPDATE hold SET owner = 'somebody else', expires_seconds = 4e9"
            await other._box._run(lambda connection: connection.execute(stolen))
        else:
            body = b'{"owner": "somebody else", "expires_seconds": 4e9}'
            await other._box._call("PutObject", Key="letters/.redrive-lock", Body=body)


@pytest.mark.parametrize("kind", ["sqlite", "s3"])
def test_a_redrive_that_has_lost_its_lock_stops_at_once(kind, tmp_path, server, monkeypatch):
    monkeypatch.setattr("anabranch.dead_letters.redrive.HOLD_SECONDS", 0.1)
    url = new_box(kind, tmp_path, server)

    async def main():
        await fill(url, keyed(3))
        handled = []

        async def handle(record):
            handled.append(record)
            await steal_lock(url)
            await asyncio.sleep(60)

        async with DeadLetters(url) as box:
            with pytest.raises(DeadLetterError, match="is being redriven by somebody else"):
                await box.redrive(handle, concurrency=1)
        assert len(handled) == 1
        assert len(await left(url)) == 3

    asyncio.run(main())


def test_a_lock_that_was_deleted_meanwhile_is_not_taken_by_two(tmp_path, server, monkeypatch):
    async def nothing(box, key):
        return None, None

    async def main():
        url = new_box("s3", tmp_path, server)
        async with DeadLetters(url) as one, DeadLetters(url) as another:
            await one._box.hold("one")
            monkeypatch.setattr("anabranch.dead_letters.s3.S3Letters._get", nothing)
            with pytest.raises(DeadLetterError, match="is being redriven by somebody else"):
                await another._box.hold("another")

    asyncio.run(main())


class CrashError(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("step", ["read", "handle", "delete"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_redrive_that_dies_anywhere_is_resumed_without_loss(crash_url, step, at, monkeypatch):
    """Only the letter that was handled and not yet removed is handled twice."""
    url = crash_url
    monkeypatch.setattr("anabranch.dead_letters.sqlite.HOLD_SECONDS", 0.01)
    monkeypatch.setattr("anabranch.dead_letters.s3.HOLD_SECONDS", 0.01)

    async def main():
        await fill(url, keyed(6))
        handler = Handler()
        box = DeadLetters(url)
        count = itertools.count(1)

        async def die(*_):
            if next(count) == at:
                raise CrashError

        async def dying_handler(record):
            if step == "read":
                await die()
            await handler(record)
            if step == "handle":
                await die()

        if step == "delete":
            delete = box._box.delete

            async def delete_and_die(stored):
                await delete(stored)
                await die()

            box._box.delete = delete_and_die
        box._box.release = box._box.close  # a killed process releases nothing
        with pytest.raises((CrashError, BaseExceptionGroup)):
            await box.redrive(dying_handler, policy=QUICK, concurrency=1)
        await asyncio.sleep(1.1 if url.startswith("sqs") else 0.02)  # until the hold has expired
        async with DeadLetters(url) as letters:
            report = await letters.redrive(handler, policy=QUICK)
        assert report.is_complete
        assert await left(url) == []
        extra = 1 if step == "handle" else 0
        assert len(handler.calls) == 6 + extra
        for number in range(3):
            assert sorted(set(handler.numbers(f"key-{number}"))) == [number, number + 3]

    asyncio.run(main())


def test_a_dry_run_counts_and_changes_nothing(url):
    async def main():
        await fill(url, keyed(4))
        handler = Handler()
        async with DeadLetters(url) as letters:
            report = await letters.redrive(handler, where=LetterFilter(key="key-0"), dry_run=True)
        assert (report.matched, report.delivered, handler.calls) == (2, 0, [])
        assert len(await left(url)) == 4

    asyncio.run(main())


def test_filters_choose_what_is_redriven_and_deleted(file_url):
    async def main():
        letters = [*keyed(4), a_letter(10, kind="KeyError")]
        await fill(file_url, letters)
        handler = Handler()
        async with DeadLetters(file_url) as box:
            await box.redrive(handler, where=LetterFilter(fingerprint="keyerror"))
            assert handler.numbers() == [10]
            assert await box.delete(LetterFilter(key="key-1")) == 1
            assert [group.count for group in await box.groups()] == [3]
            assert await box.get(letters[2].idempotency_key[:8]) == letters[2]
            with pytest.raises(DeadLetterError, match="no letter begins with 'zz'"):
                await box.get("zz")

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sqlite", "sqs", "fifo"])
def test_all_letters_of_a_key_are_deleted(kind, tmp_path, server):
    url = new_box(kind, tmp_path, server)

    async def main():
        await fill(url, [a_letter(number) for number in range(15)])  # a FIFO queue shows ten
        async with DeadLetters(url) as box:
            assert await box.delete(LetterFilter()) == 15
        assert await left(url) == []

    asyncio.run(main())


def test_letters_of_another_application_or_stream_are_not_for_the_consumer(file_url):
    consumer = Consumer("orders", app="billing")
    seen = []

    @consumer.handler
    def handle(record, context):
        assert threading.current_thread() is not threading.main_thread()
        seen.append((record.value, context.attempt, context.fence_token))

    async def main():
        await fill(file_url, [a_letter(1), a_letter(2, app="sales"), a_letter(3, stream="returns")])
        async with DeadLetters(file_url) as box:
            report = await box.redrive(consumer)
        assert (report.matched, report.delivered) == (1, 1)
        assert seen == [(b"payload 1", 1, 0)]
        assert len(await left(file_url)) == 2

    asyncio.run(main())


def test_a_batch_handler_gets_batches_of_one_with_decoded_values(file_url, review):
    consumer = Consumer("orders", app="billing", decode=dict)
    seen = []

    @consumer.batch_handler()
    async def handle(batch):
        seen.extend(record.value for record in batch)

    async def main():
        await fill(file_url, [a_letter(1, payload=b'{"n": 1}'), a_letter(2, payload=b"not JSON", key="bob")])
        async with DeadLetters(file_url) as box:
            report = await box.redrive(consumer, policy=QUICK, review=review)
        assert seen == [{"n": 1}]
        assert (report.delivered, report.reviewed) == (1, 1)
        assert (await left(review))[0].error_type == "msgspec.DecodeError"

    asyncio.run(main())


def test_a_letter_without_its_payload_stays_and_is_counted(file_url):
    async def main():
        lost = replace(a_letter(3), payload=None, overflow="file:///nowhere/x.json")
        await fill(file_url, [replace(a_letter(1), payload=None), a_letter(2), lost])
        async with DeadLetters(file_url) as box:
            report = await box.redrive(Handler(), policy=QUICK)
        assert (report.matched, report.delivered, report.without_payload, report.is_complete) == (3, 1, 2, False)
        assert "file:///nowhere/x.json is gone" in report.last_error

    asyncio.run(main())


@pytest.mark.parametrize("pointer", ["file://{folder}/notes.json", "file:///nowhere/x.json", "sqs://x", "s3:///?"])
def test_letters_whose_pointers_lead_to_no_letter_are_deleted_as_well(file_url, tmp_path, pointer, caplog):
    notes = tmp_path / "notes.json"
    notes.write_text("not a letter")

    async def main():
        wrong = [replace(a_letter(number), overflow=pointer.format(folder=tmp_path)) for number in range(2)]
        await fill(file_url, [*wrong, a_letter(2)])
        async with DeadLetters(file_url) as box:
            assert await box.delete(LetterFilter()) == 3
        assert await left(file_url) == []
        assert notes.read_text() == "not a letter"
        assert caplog.text.count("its object in the overflow was not: ") == (0 if "nowhere" in pointer else 2)

    asyncio.run(main())


def test_a_letter_from_the_overflow_is_delivered_whole_and_removed_there_too(server, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    url = server.make_queue(f"redriven-{next(NUMBERS)}", MaximumMessageSize="2048")

    async def main():
        await fill(url, [a_letter(payload=bytes(4096))], overflow=f"file://{folder}")
        assert len(list(folder.iterdir())) == 1
        handler = Handler()
        async with DeadLetters(url) as box:
            assert (await box.redrive(handler)).is_complete
        assert handler.calls[0].data == bytes(4096)
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_a_large_letter_that_fails_again_is_whole_in_review(server, tmp_path):
    """Its pointer there leads to the same object in the overflow as the pointer here."""
    folder = tmp_path / "large"
    folder.mkdir()
    url, review = (server.make_queue(f"redriven-{next(NUMBERS)}", MaximumMessageSize="2048") for _ in range(2))
    large = a_letter(payload=bytes(4096))
    then = DeadLetter(url, review=review, overflow=f"file://{folder}")
    consumer = Consumer("orders", app="billing", on_failure=Retry(then=then))
    handler = Handler(lambda record: True)
    consumer.handler(handler)

    async def main():
        await fill(url, [large], overflow=f"file://{folder}")
        async with DeadLetters(url) as box:
            assert (await box.redrive(consumer, policy=QUICK)).reviewed == 1
        handler.fails = lambda record: False
        async with DeadLetters(review) as box:
            letter = await box.get(large.idempotency_key)
            assert (letter.payload, letter.redrive_count) == (large.payload, 1)
            assert (await box.redrive(handler)).delivered == 1
        assert [record.data for record in handler.calls] == [large.payload] * 4
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_a_large_letter_leaves_nothing_in_the_overflow_if_its_review_takes_any_size(server, review, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    url = server.make_queue(f"redriven-{next(NUMBERS)}", MaximumMessageSize="2048")
    then = DeadLetter(url, review=review, overflow=f"file://{folder}")
    consumer = Consumer("orders", app="billing", on_failure=Retry(then=then))
    consumer.handler(Handler(lambda record: True))

    async def main():
        await fill(url, [a_letter(payload=bytes(4096))], overflow=f"file://{folder}")
        async with DeadLetters(url) as box:
            assert (await box.redrive(consumer, policy=QUICK)).reviewed == 1
        assert [letter.payload for letter in await left(review)] == [bytes(4096)]
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_a_letter_is_redacted_before_it_goes_to_review(file_url, review):
    def hide(letter):
        return replace(letter, message="(hidden)", stack="")

    then = DeadLetter(file_url, review=review, redact=hide)
    consumer = Consumer("orders", app="billing", on_failure=Retry(then=then))

    @consumer.handler
    async def handle(record):
        raise ValueError("card 4111")

    async def main():
        await fill(file_url, [a_letter()], redact=hide)
        async with DeadLetters(file_url) as box:
            assert (await box.redrive(consumer, policy=QUICK)).reviewed == 1
        (letter,) = await left(review)
        assert (letter.message, letter.stack, letter.redrive_count) == ("(hidden)", "", 1)

    asyncio.run(main())


def test_records_are_put_back_with_their_bytes_and_key(file_url, monkeypatch):
    async def main():
        async with LocalKinesis(create={"orders": 1, "other": 1}) as local:
            for name, value in local.environment().items():
                monkeypatch.setenv(name, value)
            await fill(file_url, [a_letter(number) for number in (1, 2, 3)])
            async with DeadLetters(file_url) as box:
                assert (await box.put_back(where=LetterFilter(letter=a_letter(1).idempotency_key))).is_complete
                assert (await box.put_back("other")).delivered == 2
            for stream, expected in (("orders", [b"payload 1"]), ("other", [b"payload 2", b"payload 3"])):
                async with Consumer(stream, start="trim_horizon", until="tip") as consumer:
                    records = [record async for record in consumer]
                assert [record.data for record in records] == expected
                assert {record.partition_key for record in records} == {"anna"}
            await fill(file_url, [a_letter(9, stream="gone")])
            async with DeadLetters(file_url) as box:
                report = await box.put_back(policy=QUICK)
            assert (report.failed, report.delivered) == (1, 0)
            assert "gone" in report.last_error

    asyncio.run(main())


def test_two_redrives_of_one_file_do_not_run_at_once(file_url):
    async def main():
        await fill(file_url, keyed(2))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(record):
            begun.set()
            await go_on.wait()

        async with DeadLetters(file_url) as one, DeadLetters(file_url) as two, asyncio.TaskGroup() as group:
            first = group.create_task(one.redrive(slow))
            await begun.wait()
            with pytest.raises(DeadLetterError, match="is being redriven by"):
                await two.redrive(slow)
            go_on.set()
        assert (await first).is_complete

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sqlite", "s3", "sqs", "fifo"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_redrive_that_is_stopped_leaves_the_rest(kind, fails, tmp_path, server):
    """The letter whose call failed when the stop came, too, as it was."""
    url = new_box(kind, tmp_path, server)

    async def main():
        await fill(url, keyed(9))
        stop = asyncio.Event()
        handler = Handler(lambda record: stop.set() or fails)
        async with DeadLetters(url) as box:
            report = await box.redrive(handler, policy=QUICK, concurrency=1, stop=stop)
        assert (report.delivered, report.failed) == (0 if fails else 1, 0)
        assert sorted(await left(url), key=stream_order) == keyed(9)[report.delivered :]

    asyncio.run(main())


def test_a_dry_run_that_puts_back_opens_no_client(file_url, monkeypatch):
    def refuse(_aws):
        raise AssertionError("a client was opened")

    async def main():
        await fill(file_url, [a_letter(1), a_letter(2)])
        monkeypatch.setattr("anabranch.dead_letters.redrive.KinesisByRegion", refuse)
        async with DeadLetters(file_url) as box:
            report = await box.put_back(dry_run=True)
        assert (report.matched, report.delivered) == (2, 0)

    asyncio.run(main())


def test_the_rate_limits_how_many_start(file_url, monkeypatch):
    waits = []

    async def main():
        await fill(file_url, keyed(4))
        async with DeadLetters(file_url) as box:

            async def note(stop, seconds):
                waits.append(seconds)
                return False

            monkeypatch.setattr("anabranch.dead_letters.redrive._is_set_within", note)
            assert (await box.redrive(Handler(), rate=0.5)).is_complete
        assert [round(wait / 2) for wait in waits] == [0, 1, 2, 3]

    asyncio.run(main())


def test_a_worker_redrives_what_comes_in_and_sends_the_rest_to_review(url, review):
    async def main():
        stop, seen = asyncio.Event(), asyncio.Event()
        handler = Handler(lambda record: record.sequence_number == "2")

        def on_progress(report):
            if handler.numbers().count(2) == 3 and report.reviewed:
                stop.set()
            seen.set()

        await fill(url, [a_letter(1, key="a")])
        async with DeadLetters(url) as box, asyncio.TaskGroup() as group:
            group.create_task(
                box.work(handler, policy=QUICK, review=review, idle=0.01, stop=stop, on_progress=on_progress)
            )
            await seen.wait()
            await fill(url, [a_letter(2, key="b")])
        assert await left(url) == []
        assert [letter.sequence_number for letter in await left(review)] == ["2"]

    asyncio.run(main())


def test_a_worker_may_start_before_there_is_a_file(file_url, review, tmp_path):
    async def main():
        stop, handler = asyncio.Event(), Handler()
        async with DeadLetters(file_url) as box, asyncio.TaskGroup() as group:
            group.create_task(
                box.work(handler, review=review, idle=0.01, stop=stop, on_progress=lambda report: stop.set())
            )
            while not (tmp_path / "letters.db").exists():  # noqa: ASYNC110 -- nothing tells us
                await asyncio.sleep(0.01)
            await fill(file_url, [a_letter(1)])
        assert handler.numbers() == [1]

    asyncio.run(main())


def test_a_worker_without_a_review_destination_is_refused(file_url):
    async def main():
        async with DeadLetters(file_url) as box:
            with pytest.raises(ConfigurationError, match="needs a review destination"):
                await box.work(Handler())
            with pytest.raises(ConfigurationError, match="where the letters are"):
                await box.redrive(Handler(), review=file_url)
            with pytest.raises(ConfigurationError, match="not a name"):
                await box.put_back("not a name")
            with pytest.raises(ConfigurationError, match="rate is 0"):
                await box.redrive(Handler(), rate=0)
            with pytest.raises(ConfigurationError, match="rate is '10'; it must be a number"):
                await box.redrive(Handler(), rate="10")
            with pytest.raises(ConfigurationError, match="needs a consumer with a handler, or a function, not 7"):
                await box.redrive(7)
        with pytest.raises(ConfigurationError, match="url is 7; it must be text"):
            DeadLetters(7)

    asyncio.run(main())


def test_an_export_has_each_whole_letter_on_a_line(file_url, tmp_path):
    async def main():
        await fill(file_url, keyed(3))
        async with DeadLetters(file_url) as box:
            assert await box.export(tmp_path / "out.jsonl") == 3
        assert [decode_letter(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()] == keyed(3)

    asyncio.run(main())

"""Every destination keeps a letter, once by its key, and says what is wrong with it. SQS and S3 are moto's."""

import asyncio
import functools
import itertools

import pytest
from msgspec.structs import replace

from anabranch import Consumer
from anabranch.dead_letters.destinations import HOLD_SECONDS, StoredLetter
from anabranch.dead_letters.opening import default_path, fetch_whole, open_box, open_destination, open_url
from anabranch.errors import ConfigurationError, DeadLetterError
from anabranch.letters import decode_letter
from anabranch.local import LocalKinesis
from letter_samples import AWS_NAMES, a_letter, moto

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server():
    with moto() as server:
        yield server


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    for name, value in AWS_NAMES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("anabranch.dead_letters.sqs.WAIT_SECONDS", 0)  # moto hides nothing from a short poll


@pytest.fixture(params=["sqlite", "s3", "sqs", "fifo"])
def url(request, tmp_path, server):
    """A new, empty box of each kind."""
    number = next(NUMBERS)
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/letters.db"
    if request.param == "s3":
        return server.make_bucket(f"letters-{number}")
    return server.make_queue(f"letters-{number}" + (".fifo" if request.param == "fifo" else ""))


def destination(url, **options):
    return open_destination(url, app="billing", environ={}, **options)


async def write_all(url, letters, **options):
    writer = destination(url, **options)
    await writer.check(24)
    for letter in letters:
        await writer.write(letter)
    await writer.close()


async def read_all(url):
    box = open_box(url)
    try:
        return [stored.letter async for stored in box.read()]
    finally:
        await box.release()
        await box.close()


def test_letters_come_back_whole_once_and_in_stream_order(url):
    letters = [a_letter(number, key=f"key-{number}") for number in (11, 2, 7)]

    async def main():
        await write_all(url, letters)
        await write_all(url, letters[:2])
        assert await read_all(url) == [letters[1], letters[2], letters[0]]
        assert await read_all(url) == [letters[1], letters[2], letters[0]], "reading holds letters back"

    asyncio.run(main())


def test_a_letter_that_was_recovered_does_not_replace_the_first_one(url):
    first = a_letter()
    again = replace(first, message="", stack="", recovered=True)

    async def main():
        await write_all(url, [first, again])
        assert await read_all(url) == [first]

    asyncio.run(main())


def test_a_letter_that_failed_again_replaces_the_earlier_one(url):
    letter = a_letter()

    async def main():
        await write_all(url, [letter, replace(letter, redrive_count=2), replace(letter, redrive_count=1)])
        assert [one.redrive_count for one in await read_all(url)] == [2]

    asyncio.run(main())


def test_a_letter_can_be_replaced_and_deleted(url):
    letters = [a_letter(number, key=f"key-{number}") for number in (1, 2)]

    async def main():
        await write_all(url, letters)
        box = open_box(url)
        await box.hold("me")
        one, two = [stored async for stored in box.read()]
        await box.replace(one, replace(one.letter, redrive_count=1))
        await box.delete(two)
        await box.hold("me")
        await box.release()
        await box.close()
        stays = ".fifo" in url  # a new message would be behind the later ones of its key
        assert await read_all(url) == [letters[0] if stays else replace(letters[0], redrive_count=1)]

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sqlite", "s3"])
def test_only_one_redrive_holds_a_box_until_it_releases_it_or_dies(kind, tmp_path, server, monkeypatch):
    url = f"sqlite://{tmp_path}/letters.db" if kind == "sqlite" else server.make_bucket(f"letters-{next(NUMBERS)}")

    async def main():
        await write_all(url, [a_letter()])
        one, two = open_box(url), open_box(url)
        await one.hold("one")
        with pytest.raises(DeadLetterError, match="is being redriven by one") as caught:
            await two.hold("two")
        assert (caught.value.code, caught.value.retryable) == ("locked", True)
        await one.release()
        await two.hold("two")
        with pytest.raises(DeadLetterError, match="by two"):
            await one.hold("one")
        now = __import__("time").time()
        monkeypatch.setattr("time.time", lambda: now + HOLD_SECONDS + 1)
        await one.hold("one")
        with pytest.raises(DeadLetterError, match="by one"):
            await two.hold("two")
        await one.close()
        await two.close()

    asyncio.run(main())


def test_an_invalid_letter_is_not_touched_and_is_reported(server):
    name = f"letters-{next(NUMBERS)}"
    url = server.make_queue(name)
    sqs = server.client("sqs")
    queue = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    sqs.send_message(QueueUrl=queue, MessageBody="hello")

    async def main():
        await write_all(url, [a_letter()])
        box = open_box(url)
        assert [stored.letter async for stored in box.read()] == [a_letter()]
        (told,) = box.unreadable
        assert "not a dead letter" in told
        await box.release()
        await box.close()

    asyncio.run(main())
    assert (
        sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]["ApproximateNumberOfMessages"]
        == "2"
    )


def test_a_letter_that_is_too_large_needs_an_overflow_and_is_never_cut(server, tmp_path, monkeypatch):
    name = f"letters-{next(NUMBERS)}"
    url = server.make_queue(name, MaximumMessageSize="2048")
    large = a_letter(payload=bytes(4096))

    async def main():
        with pytest.raises(DeadLetterError, match=r"has 6,\d\d\d bytes, and sqs://\S+ takes 2,048") as caught:
            await write_all(url, [large])
        assert caught.value.code == "too_large"
        assert not caught.value.retryable
        (tmp_path / "large").mkdir()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = server.make_bucket(f"large-{next(NUMBERS)}").partition("?")[0]
        for overflow in (bucket, f"file://{tmp_path}/large"):
            await write_all(url, [large], overflow=overflow)
            box = open_box(url)
            (stored,) = [one async for one in box.read()]
            assert stored.letter.payload is None
            assert stored.letter.overflow.startswith(f"{overflow}/")
            assert await fetch_whole(stored) == large
            await box.delete(stored)
            await box.close()

    asyncio.run(main())


def test_redaction_comes_before_anything_is_written(tmp_path):
    url = f"sqlite://{tmp_path}/letters.db"

    def hide(letter):
        return replace(letter, payload=None, message="(hidden)", stack="")

    async def main():
        await write_all(url, [a_letter(message="card 4111")], redact=hide)
        (letter,) = await read_all(url)
        assert (letter.payload, letter.message, letter.partition_key) == (None, "(hidden)", "anna")
        for wrong in (lambda letter: 1 / 0, lambda letter: None, lambda letter: a_letter(99)):
            with pytest.raises(DeadLetterError, match="redact= r") as caught:
                await write_all(url, [a_letter(2)], redact=wrong)
            assert caught.value.code == "unusable"
        assert len(await read_all(url)) == 1

    asyncio.run(main())


def test_a_queue_that_keeps_letters_for_a_short_time_is_a_warning(server):
    short = server.make_queue(f"letters-{next(NUMBERS)}", MessageRetentionPeriod=str(96 * 3600))
    long = server.make_queue(f"letters-{next(NUMBERS)}", MessageRetentionPeriod=str(14 * 24 * 3600))

    async def warnings(url, hours):
        writer = destination(url)
        try:
            return await writer.check(hours)
        finally:
            await writer.close()

    async def main():
        (warning,) = await warnings(short, 24)
        assert "deletes letters after 96 h, and 14 days are advised" in warning
        assert await warnings(long, 24) == []
        (warning,) = await warnings(long, 8760)
        assert "after 336 h, and the stream keeps 8760 h" in warning

    asyncio.run(main())


def test_a_bucket_that_expires_letters_soon_is_a_warning(server):
    url = server.make_bucket(name := f"letters-{next(NUMBERS)}")
    rule = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": "letters/"}, "Expiration": {"Days": 3}}
    server.client("s3").put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})

    async def main():
        writer = destination(url)
        (warning,) = await writer.check(24)
        assert "deletes letters after 72 h" in warning
        await writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["sqs://nowhere", "s3://nowhere-at-all/x"])
def test_a_destination_that_does_not_exist_is_named(scheme, server):
    async def main():
        writer = destination(f"{scheme}?endpoint={server.url}&region=eu-west-1")
        with pytest.raises(DeadLetterError, match=r"nowhere.* does not exist: create it") as caught:
            await writer.check(24)
        assert (caught.value.code, caught.value.retryable) == ("missing", False)
        await writer.close()

    asyncio.run(main())


def test_a_destination_that_is_down_may_be_tried_again():
    async def main():
        writer = destination("sqs://letters?endpoint=http://127.0.0.1:9&region=eu-west-1")
        with pytest.raises(DeadLetterError, match="sqs://letters did not answer") as caught:
            await writer.write(a_letter())
        assert (caught.value.code, caught.value.retryable) == ("no_answer", True)
        await writer.close()

    asyncio.run(main())


def test_a_stream_takes_letters_under_the_key_of_their_record(monkeypatch):
    async def main():
        async with LocalKinesis(create={"failures": 1}) as local:
            for name, value in local.environment().items():
                monkeypatch.setenv(name, value)
            writer = destination("kinesis://failures")
            (warning,) = await writer.check(24)
            assert "deletes letters after 24 h" in warning
            await writer.write(a_letter())
            with pytest.raises(DeadLetterError, match="takes 1,047,552") as caught:
                await writer.write(a_letter(payload=bytes(1 << 20)))
            assert caught.value.code == "too_large"
            await writer.close()
            async with Consumer("failures", start="trim_horizon", until="tip") as consumer:
                (record,) = [record async for record in consumer]
            assert record.partition_key == "anna"
            assert decode_letter(record.data) == a_letter()

    asyncio.run(main())


def test_a_function_takes_letters_and_its_failure_is_a_reason():
    async def main():
        taken = []

        async def keep(letter):
            taken.append(letter)

        @functools.wraps(keep)
        def wrapped(letter):
            return keep(letter)

        @functools.wraps(keep)
        def lying(letter):
            taken.append(letter)

        async def fail(letter):
            raise KeyError("no database")

        for function in (keep, functools.partial(keep), wrapped):
            await destination(function).write(a_letter())
        assert taken == [a_letter()] * 3
        with pytest.raises(DeadLetterError, match="fail failed: KeyError: 'no database'") as caught:
            await destination(fail).write(a_letter())
        assert caught.value.retryable
        with pytest.raises(ConfigurationError, match="append is not async: make it an async def"):
            destination(taken.append)
        with pytest.raises(DeadLetterError, match="is not async"):
            await destination(lying).write(a_letter())

    asyncio.run(main())


def test_the_default_is_a_file_beside_the_leases_and_refused_in_containers(tmp_path):
    assert default_path("a/b", {}, tmp_path / "leases.db") == tmp_path / "a%2Fb.letters.db"
    assert default_path("billing", {"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "anabranch" / "billing.letters.db"

    async def warnings(leases_path):
        environ = {"XDG_STATE_HOME": str(tmp_path)}
        writer = open_destination(None, app="billing", environ=environ, leases_path=leases_path)
        try:
            return await writer.check(24)
        finally:
            await writer.close()

    assert asyncio.run(warnings(tmp_path / "leases.db")) == []
    assert "workers on other machines do not share" in asyncio.run(warnings(None))[0]
    with pytest.raises(ConfigurationError, match=r"this is Kubernetes .* write DeadLetter\('sqs://billing-failures'\)"):
        default_path("billing", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    "wrong",
    ["sqs://", "sqs://a/b", "https://sqs.eu-west-1.amazonaws.com/1/x", "s3://", "kinesis://", "sqlite://x", "x", "",
     "sqs://name?color=red", "sqs://name?region=-", "s3://bucket?endpoint=x", "kinesis://failures?region=eu-west-1",
     "sqlite:///", "sqs://[x"],
)  # fmt: skip
def test_what_names_no_destination_is_refused_with_what_would(wrong):
    with pytest.raises(ConfigurationError, match="://"):
        open_url(wrong)


@pytest.mark.parametrize(
    "wrong, says",
    [("sqlite:a%00b.db", "NUL"), ("sqlite::memory:", "name a file"), ("sqlite:///~/x.db", "~ is not expanded"),
     ("sqlite:///var/lib/", "names a folder"), ("sqlite:x.db#y", "three slashes")],
)  # fmt: skip
def test_a_path_that_would_mean_another_file_is_refused(wrong, says):
    with pytest.raises(ConfigurationError, match=says):
        open_url(wrong)


@pytest.mark.parametrize("wrong, says", [("file:///~/x", "~ is not expanded"), ("file:a%00b", "NUL")])
def test_a_folder_that_would_be_another_one_is_refused(wrong, says):
    with pytest.raises(ConfigurationError, match=says):
        destination("sqs://y", overflow=wrong)


def test_what_cannot_be_read_or_take_any_size_is_refused():
    with pytest.raises(ConfigurationError, match="read with a consumer"):
        open_box("kinesis://failures")
    with pytest.raises(ConfigurationError, match="overflow='sqs://x' must be s3"):
        destination("sqs://y", overflow="sqs://x")
    with pytest.raises(ConfigurationError, match="set the endpoint in AWS_ENDPOINT_URL_S3"):
        destination("sqs://y", overflow="s3://bucket/x?endpoint=http://elsewhere")
    with pytest.raises(ConfigurationError, match="is not a dead-letter destination"):
        destination(7)
    with pytest.raises(ConfigurationError, match=r"; for a file, write sqlite:letters\.db$"):
        destination("letters.db")


@pytest.mark.parametrize(
    "pointer", ["sqs://x", "file:///etc/hostname", "file:///nowhere", "s3://b/x?endpoint=http://x"]
)
def test_a_pointer_that_leads_nowhere_is_an_error_of_its_letter(pointer):
    with pytest.raises(DeadLetterError):
        asyncio.run(fetch_whole(StoredLetter(replace(a_letter(), overflow=pointer), None)))


def test_a_file_that_is_missing_or_holds_something_else_is_named(tmp_path):
    async def main():
        other = tmp_path / "notes.db"
        other.write_bytes(b"plain text, and long enough to be no empty file")
        with pytest.raises(DeadLetterError, match="cannot be used: file is not a database"):
            await write_all(f"sqlite://{other}", [a_letter()])
        with pytest.raises(DeadLetterError, match="its folder does not exist") as caught:
            await write_all(f"sqlite://{tmp_path}/nowhere/x.db", [a_letter()])
        assert caught.value.code == "missing"
        with pytest.raises(DeadLetterError, match="there is no file"):
            await read_all(f"sqlite://{tmp_path}/nothing.db")

    asyncio.run(main())

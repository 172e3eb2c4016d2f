"""`anabranch dlq`: dead letters listed, shown, dropped, exported and redriven, also by processes that are killed."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import boto3
import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from anabranch import DeadLetters
from anabranch.dead_letters.opening import open_destination
from anabranch.letters import decode_letter
from letter_samples import a_letter, environment, moto
from patience import PATIENCE, wait_for

PROGRAM = (sys.executable, "-m", "anabranch")
MODULE = """
import os, time
import anabranch

consumer = anabranch.Consumer("orders", app="billing")
waits = anabranch.Consumer("orders", app="billing")

def note(record):
    with open("handled", "a") as file:
        file.write(record.sequence_number + "\\n")

@consumer.handler
def handle(record):
    note(record)
    if record.data == b"bad":
        raise LookupError("no such customer")

@waits.handler
def wait(record):
    note(record)
    while record.sequence_number == "3" and not os.path.exists("go"):
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def server():
    with moto() as server:
        yield server


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    return tmp_path


@pytest.fixture
def url(folder):
    return f"sqlite://{folder}/letters.db"


def fill(url, letters):
    async def main():
        writer = open_destination(url, app="billing", environ={})
        for letter in letters:
            await writer.write(letter)
        await writer.close()

    asyncio.run(main())


def left(url):
    async def main():
        async with DeadLetters(url) as letters:
            return [letter async for letter in letters.letters()]

    return asyncio.run(main())


def handled(folder):
    file = folder / "handled"
    return file.read_text().split() if file.exists() else []


def test_letters_are_listed_by_failure_and_one_by_one(cli, url):
    fill(url, [a_letter(1), a_letter(2, key="bob"), a_letter(3, kind="KeyError", message="'iban'")])
    groups = cli("dlq", "ls", url)
    assert groups.code == 0
    assert groups.out.splitlines()[0].split() == ["LETTERS", "KEYS", "LAST", "FINGERPRINT", "FAILURE"]
    assert groups.out.splitlines()[1].split()[:2] == ["2", "2"]
    assert "KeyError: 'iban'" in groups.out
    assert [group["count"] for group in cli("dlq", "ls", url, "--json").json] == [2, 1]
    each = cli("dlq", "ls", url, "--letters", "--key", "bob")
    assert a_letter(2, key="bob").idempotency_key[:12] in each.out
    assert len(each.out.splitlines()) == 2
    (document,) = cli("dlq", "ls", url, "--letters", "--key", "bob", "--json").json
    assert (document["sequence_number"], "payload" in document) == ("2", False)
    assert cli("dlq", "ls", url, "--since", "-1h").err == "no letters\n"


def test_a_letter_is_shown_with_its_stack_and_payload(cli, url):
    fill(url, [a_letter(payload=b"\x1b[31mred")])
    shown = cli("dlq", "show", url, a_letter().idempotency_key[:8])
    assert shown.code == 0
    assert "\n  Traceback\n" in shown.out
    assert ["shard", "orders/shardId-000000000000"] in [line.split() for line in shown.out.splitlines()]
    assert "payload, 8 bytes: \\x1b[31mred" in shown.out, "an escape sequence reached the terminal"
    whole = cli("dlq", "show", url, a_letter().idempotency_key[:8], "--json")
    assert decode_letter(json.dumps(whole.json)) == a_letter(payload=b"\x1b[31mred")
    missing = cli("dlq", "show", url, "ffff")
    assert (missing.code, missing.out) == (1, "")
    assert "no letter begins with 'ffff'" in missing.err
    assert "give more digits" not in missing.err
    fill(url, [a_letter(number) for number in range(2, 40)])
    assert "letters begin with ''" in (several := cli("dlq", "show", url, "").err)
    assert "give more digits" in several


def test_letters_that_anybody_may_have_written_are_shown_harmlessly(cli, url):
    evil = replace(a_letter(1, key="\x1b[2J", message="\u202egnp.exe\x07"), written_seconds=1e300, app="\x9b1m")
    fill(url, [evil])
    for words in (["ls", url], ["ls", url, "--letters"], ["show", url, evil.idempotency_key]):
        for options in ([], ["--json"]):
            shown = cli("dlq", *words, *options)
            assert shown.code == 0
            assert not set("\x1b\u202e\x07\x9b") & set(shown.out + shown.err)


def on_terminal(*words):
    code = "import sys; from anabranch._cli.command_line import main; sys.exit(main(sys.argv[1:]))"
    terminal = {**os.environ, "COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-c", code, "dlq", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=terminal)


def test_tables_fit_eighty_columns(url):
    fill(url, [a_letter(1, key="k" * 200, message="m" * 500), a_letter(2, key="\u4f60" * 50)])
    for words in (["ls", url], ["ls", url, "--letters"]):
        shown = on_terminal(*words)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert max(map(cell_len, shown.stdout.splitlines())) <= 80


def test_what_became_of_the_letters_fits_eighty_columns(folder, url):
    bad = a_letter(2, payload=b"bad", key="bob")
    fill(url, [a_letter(1), bad, a_letter(3, key="bob"), replace(a_letter(4, key="carl"), payload=None)])
    shown = on_terminal("redrive", url, "app:consumer", "--attempts", "1")
    assert max(map(cell_len, shown.stdout.splitlines())) <= 80
    told = " ".join(shown.stdout.split())
    assert told.startswith(
        "4 letters: 1 delivered, 1 failed again and kept, 1 kept, behind a failed letter of the same"
    )


def test_letters_are_dropped_by_filter_and_only_after_confirmation(cli, url):
    fill(url, [a_letter(1), a_letter(2, key="bob")])
    assert "give a filter" in cli("dlq", "drop", url, "--yes").err
    assert "Not a terminal" in cli("dlq", "drop", url, "--key", "bob").err
    assert cli("dlq", "drop", url, "--key", "bob", "--yes").out == "1 letter deleted\n"
    assert cli("dlq", "drop", url, "--all", "--yes").out == "1 letter deleted\n"
    assert left(url) == []


def test_letters_are_exported_whole_to_a_new_file(cli, url, tmp_path):
    fill(url, [a_letter(1), a_letter(2)])
    assert cli("dlq", "export", url, str(tmp_path / "out.jsonl")).out.startswith("2 letters written to ")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [decode_letter(line) for line in lines] == [a_letter(1), a_letter(2)]
    assert "exists: name a new file" in cli("dlq", "export", url, str(tmp_path / "out.jsonl")).err


def test_a_letter_whose_overflow_is_gone_is_shown_and_exported_without_its_payload(cli, url, tmp_path):
    lost = replace(a_letter(2), payload=None, overflow="file:///nowhere/\x1b[31m.json")
    fill(url, [a_letter(1), lost, a_letter(3)])
    shown = cli("dlq", "show", url, lost.idempotency_key)
    assert shown.code == 0
    assert "no payload: file:///nowhere/\\x1b[31m.json is gone" in shown.out
    command = [*PROGRAM, "dlq", "export", url, str(tmp_path / "out.jsonl")]
    exported = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (exported.returncode, exported.stdout.startswith("3 letters written")) == (0, True)
    assert (
        f"the letter of record {lost.place} has no payload: file:///nowhere/\\x1b[31m.json is gone" in exported.stderr
    )
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [decode_letter(line) for line in lines] == [a_letter(1), lost, a_letter(3)]


def test_an_export_that_fails_leaves_no_file(cli, tmp_path):
    failed = cli("dlq", "export", f"sqlite://{tmp_path}/none.db", str(tmp_path / "out.jsonl"))
    assert (failed.code, "there is no file" in failed.err) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_letters_are_redriven_to_the_handler_of_a_consumer(cli, folder, url):
    fill(url, [a_letter(1), a_letter(2, payload=b"bad", key="bob"), a_letter(3)])
    assert cli("dlq", "redrive", url, "app:consumer", "--dry-run").out == "3 letters would be redriven\n"
    assert handled(folder) == []
    review = f"sqlite://{folder}/review.db"
    words = ("dlq", "redrive", url, "app:consumer", "--backoff", "0", "--concurrency", "1")
    first = cli(*words, "--review", review)
    assert (first.code, first.out.splitlines()) == (
        0,
        [
            "3 letters: 2 delivered, 1 failed again and moved to review",
            "the last failure: LookupError: no such customer",
        ],
    )
    assert handled(folder) == ["1", "2", "2", "2", "3"]
    assert [letter.redrive_count for letter in left(review)] == [1]
    assert cli("dlq", "redrive", url, "app:consumer").out == "no letters\n"
    again = cli("dlq", "redrive", review, "app:consumer", "--attempts", "1", "--json")
    assert (again.code, again.json["failed"], again.json["delivered"]) == (1, 1, 0)


def test_a_redrive_says_what_it_needs(cli, folder, url):
    for words in ([], ["app:consumer", "--to-stream"]):
        said = cli("dlq", "redrive", url, *words)
        assert (said.code, "say where the records go" in said.err) == (2, True)
    assert "there is no file" in cli("dlq", "ls", url).err
    assert "read with a consumer" in cli("dlq", "ls", "kinesis://failures").err
    assert "needs a review destination" in cli("dlq", "worker", "app:consumer", url).err


@contextlib.contextmanager
def started(*words, **options):
    process = subprocess.Popen(
        [*PROGRAM, "dlq", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_redrive_that_is_killed_at_a_letter_continues_with_it(folder, url):
    """kill -9 in the handler of the third letter; the lock of the dead process is waited out by its expiry."""
    fill(url, [a_letter(number) for number in range(1, 6)])
    with started("redrive", url, "app:waits") as process:
        wait_for(lambda: "3" in handled(folder), "the third letter")
        process.kill()
        process.wait()
    assert [letter.sequence_number for letter in left(url)] == ["3", "4", "5"]
    (folder / "go").touch()
    locked = subprocess.run([*PROGRAM, "dlq", "redrive", url, "app:waits"], capture_output=True, text=True, check=False)
    assert (locked.returncode, "is being redriven by" in locked.stderr) == (1, True)

    async def expire():
        letters = DeadLetters(url)
        await letters._box._run(lambda connection: connection.execute("UPDATE hold SET expires_seconds = 0"))
        await letters.close()

    asyncio.run(expire())
    done = subprocess.run([*PROGRAM, "dlq", "redrive", url, "app:waits"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3 letters: 3 delivered\n")
    assert handled(folder) == ["1", "2", "3", "3", "4", "5"]
    assert left(url) == []


def test_ctrl_c_lets_the_running_letter_finish_and_leaves_the_rest(folder, url):
    fill(url, [a_letter(number) for number in range(1, 6)])
    with started("redrive", url, "app:waits", "--concurrency", "1") as process:
        wait_for(lambda: "3" in handled(folder), "the third letter")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "finishing the letters" in process.stdout.readline(), "the stop")
        (folder / "go").touch()
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "stopped; run the same command again to continue" in output
    assert "Traceback" not in output
    assert [letter.sequence_number for letter in left(url)] == ["4", "5"]


def test_a_second_ctrl_c_does_not_wait_for_a_handler(folder, url):
    fill(url, [a_letter(number) for number in range(1, 6)])
    with started("redrive", url, "app:waits", "--concurrency", "1") as process:
        wait_for(lambda: "3" in handled(folder), "the third letter")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "finishing the letters" in process.stdout.readline(), "the stop")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
    assert [letter.sequence_number for letter in left(url)] == ["3", "4", "5"]


@pytest.mark.long
def test_a_worker_is_a_process_that_redrives_a_queue_until_it_is_stopped(folder, server):
    queue, review = server.make_queue("working"), server.make_queue("review")
    fill_letters = [a_letter(1), a_letter(2, payload=b"bad", key="bob")]
    with environment(server.environment):
        fill(queue, fill_letters)
        with started("worker", "app:consumer", queue, "--review", review, "--backoff", "0.01", "--idle", "0.1") as one:
            wait_for(lambda: len(handled(folder)) == 4, "the first two letters")
            fill(queue, [a_letter(3)])
            wait_for(lambda: "3" in handled(folder), "the third letter")
            one.send_signal(signal.SIGTERM)
            output, _ = one.communicate(timeout=PATIENCE)
        assert one.returncode == 0, output
        assert "failed again, and went to review: LookupError: no such customer" in output
        assert left(queue) == []
        assert [letter.sequence_number for letter in left(review)] == ["2"]


def test_the_lambda_function_retries_with_growing_pauses_and_then_sends_to_review(server, monkeypatch):
    sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[3] / "examples"))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    import dead_letter_function

    queue, review = server.make_queue("for-lambda"), server.make_queue("for-people")
    sqs = boto3.client("sqs")
    queue_url = sqs.get_queue_url(QueueName="for-lambda")["QueueUrl"]
    monkeypatch.setenv("QUEUE_URL", queue_url)
    monkeypatch.setenv("REVIEW_QUEUE_URL", sqs.get_queue_url(QueueName="for-people")["QueueUrl"])
    pauses = []

    class Sqs:
        send_message = sqs.send_message

        def change_message_visibility(self, VisibilityTimeout, **options):  # noqa: N803 -- AWS's name
            pauses.append(VisibilityTimeout)
            sqs.change_message_visibility(VisibilityTimeout=0, **options)

    monkeypatch.setattr(dead_letter_function.boto3, "client", lambda _: Sqs())
    fill(queue, [a_letter(1, payload=b"41"), a_letter(2, payload=b"ten")])
    sqs.send_message(QueueUrl=queue_url, MessageBody="no letter")

    def invoke():
        received = sqs.receive_message(
            QueueUrl=queue_url, MaxNumberOfMessages=10, AttributeNames=["ApproximateReceiveCount"]
        ).get("Messages", [])
        records = [
            {"messageId": one["MessageId"], "body": one["Body"], "receiptHandle": one["ReceiptHandle"],
             "attributes": one["Attributes"]}
            for one in received
        ]  # fmt: skip
        kept = {
            one["itemIdentifier"]
            for one in dead_letter_function.handler({"Records": records}, None)["batchItemFailures"]
        }
        for one in received:  # as Lambda does
            if one["MessageId"] not in kept:
                sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=one["ReceiptHandle"])
        return len(received)

    assert [invoke() for _ in range(4)] == [3, 2, 2, 0]
    assert pauses == [30, 30, 60, 60]
    assert left(review) == [a_letter(2, payload=b"ten")]
    kept = sqs.receive_message(QueueUrl=os.environ["REVIEW_QUEUE_URL"], MaxNumberOfMessages=10)["Messages"]
    assert "no letter" in [message["Body"] for message in kept]

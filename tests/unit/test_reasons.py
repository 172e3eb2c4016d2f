"""Every reason has a stable code, a text and advice, and is the same value after a round trip through JSON."""

import pickle

import msgspec
import pytest
from msgspec.structs import replace

from anabranch import reasons
from anabranch._model.leases import LeaseKey, LeaseRow, ShardStatus, StatusRow, Stopped
from anabranch.reasons import Reason, UnknownReason, parse_reason
from anabranch.stores.row_codec import decode_row, encode_row
from reason_samples import RECORD, SAMPLES

EVERY = pytest.mark.parametrize("reason", SAMPLES, ids=lambda reason: reason.code)
STATUS = StatusRow(member_id="a", revision=1)
KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")


def kinds_of(base):
    subclasses = base.__subclasses__()
    return set().union(*map(kinds_of, subclasses)) if subclasses else {base}


def test_each_kind_is_public_and_has_one_sample():
    kinds = kinds_of(Reason)
    assert sorted(kinds, key=repr) == sorted([UnknownReason, *map(type, SAMPLES)], key=repr)
    assert kinds == {getattr(reasons, kind.__name__) for kind in kinds}
    assert not [kind for kind in kinds if kind.__name__.startswith("_")]
    assert kinds == {*reasons._KINDS.values(), UnknownReason}


def test_the_codes_stay_as_they_are():
    """Programs compare them, and rows of other versions have them."""
    assert {reason.code for reason in SAMPLES} == {
        "application-moved", "budget-full", "calls-outlive-hand-off", "children-unknown", "children-unlisted",
        "clock-skew", "consumer-missing", "consumer-name-shared", "handed-over", "handled-alone",
        "held-back-bytes-limit", "letter-not-written", "looks-like-outage", "no-live-worker", "no-room-for-held-back",
        "not-taken-yet", "open-keys-limit",
        "paused-by-program", "paused-in-store", "polling-denied", "reads-failing", "reads-throttled",
        "record-in-handler", "record-unfinished", "replay-bytes-limit",
        "stopped-by-crashes", "stopped-by-handler", "stopped-by-payload", "store-access-denied", "store-throttled",
        "store-unreachable", "stream-key-denied", "stream-not-read", "subscription-denied", "subscription-failing",
        "subscription-in-use", "subscription-taken-over", "timeout-ignored", "waits-for-isolated-shard",
        "waits-for-parents", "worker-dead", "worker-silent", "workers-full", "workers-stopping",
    }  # fmt: skip


@EVERY
def test_a_reason_is_a_value_with_a_text_and_an_advice(reason):
    assert str(reason) == reason.text != ""
    assert not reason.text.endswith(".")
    assert reason.advice != ""
    assert not reason.advice.endswith(".")
    assert type(reason).__doc__
    assert pickle.loads(pickle.dumps(reason)) == reason == replace(reason)
    assert hash(reason) == hash(replace(reason))
    with pytest.raises(AttributeError):
        reason.text = "something else"


@EVERY
def test_json_shows_code_text_and_fields_and_gives_the_same_value(reason):
    document = msgspec.json.decode(msgspec.json.encode(reason))
    assert document["code"] == reason.code
    assert document["text"] == reason.text
    assert set(document) == {"code", *reason.__struct_fields__}
    assert parse_reason(document) == reason


@EVERY
def test_rows_keep_a_reason(reason):
    status = msgspec.structs.replace(STATUS, shards=(ShardStatus("shardId-000000000000", reason),))
    assert decode_row("status", encode_row(status)) == status
    stopped = LeaseRow(key=KEY, stopped=Stopped(reason, None, None, "a#1", 7))
    assert decode_row("lease", encode_row(stopped)).stopped == stopped.stopped


def test_a_reason_of_another_version_keeps_its_code_and_text():
    """One with an unknown code, one with fields that do not fit, and text from before there were codes."""
    newer = {"code": "subscription-limit", "text": "20 consumers are registered", "limit": 20}
    changed = {"code": "workers-full", "text": "all are full", "worker_count": 3}
    unfit = {"code": "handed-over", "text": "it goes to 3 workers", "to_member": ["a", "b", "c"]}
    assert parse_reason(newer) == UnknownReason(code="subscription-limit", text="20 consumers are registered")
    assert parse_reason(changed) == reasons.WorkersFull()
    assert parse_reason(unfit) == UnknownReason(code="handed-over", text="it goes to 3 workers")
    assert parse_reason("its handler failed") == UnknownReason(code="unknown", text="its handler failed")
    del newer["text"]
    assert parse_reason(newer).text == "subscription-limit (limit 20)"
    known = UnknownReason(code="subscription-limit", text="20 consumers are registered")
    assert (known.code, str(known)) == ("subscription-limit", "20 consumers are registered")
    assert parse_reason(msgspec.to_builtins(known)) == known


@pytest.mark.parametrize("document", [None, 3, [], ["code"], {}, {"code": None}, {"code": {}, "text": []}])
def test_a_document_that_is_no_reason_is_still_shown(document):
    assert isinstance(parse_reason(document), UnknownReason)


def test_a_status_row_of_a_newer_version_is_read():
    """With a reason that is not known here, and a field more for each shard."""
    row = msgspec.structs.replace(STATUS, shards=(ShardStatus("shardId-000000000000", SAMPLES[0]),))
    fields = msgspec.json.decode(encode_row(row))
    (shard,) = msgspec.json.decode(fields["shards"])
    shard[1] = {"code": "retention-near", "text": "records are trimmed in 5 minutes", "seconds": 300}
    fields["shards"] = msgspec.json.encode([[*shard, "more"]]).decode()
    (found,) = decode_row("status", msgspec.json.encode(fields)).shards
    assert found.reason == UnknownReason(code="retention-near", text="records are trimmed in 5 minutes")


def test_a_stop_that_was_stored_as_plain_text_is_read():
    row = LeaseRow(key=KEY, stopped=Stopped(SAMPLES[-1], None, None, "a#1", 7))
    fields = msgspec.json.decode(encode_row(row)) | {"stopped_reason": "its handler failed 3 times"}
    assert str(decode_row("lease", msgspec.json.encode(fields)).stopped.reason) == "its handler failed 3 times"


def test_a_shortened_reason_has_short_texts_that_any_store_takes():
    long = reasons.ReadsFailing(error="x" * 500 + "\ud800", failure_count=2)
    short = long.shortened(20)
    assert (short.error, short.failure_count) == ("x" * 19 + "…", 2)
    assert short.text == f"its reads fail (2 in a row): {short.error}"
    assert reasons.ReadsFailing(error="caf\udce9", failure_count=1).shortened(20).error == "caf\\udce9"
    assert UnknownReason(code="new", text="y" * 30).shortened(10) == UnknownReason(code="new", text="y" * 9 + "…")
    assert reasons.WorkersFull().shortened(1) == reasons.WorkersFull()


@pytest.mark.parametrize(
    "reason, text",
    [
        (reasons.StoreUnreachable(error=None), "no heartbeat was acknowledged in time"),
        (
            reasons.ReadsFailing(error="{error} {0.text!r} %s", failure_count=1),
            "its reads fail (1 in a row): {error} {0.text!r} %s",
        ),
        (
            reasons.CallsOutliveHandOff(to_member="b", call_count=1),
            "the hand-off to b waits: 1 cancelled handler call still runs",
        ),
        (
            reasons.BudgetFull(seconds=10, used_bytes=9, limit_bytes=10),
            "the byte budget has been full for 10 s: unfinished records use 9 of 10 bytes",
        ),
        (
            reasons.RecordUnfinished(**RECORD | {"position": "7:0"}, seconds=12, children_wait=True),
            "the shard has ended and its children wait: record 7:0 of key 'user-1' has not been finished for 12 s",
        ),
        (
            reasons.RecordInHandler(position="7:0", partition_key="a", seconds=12),
            "record 7:0 of key 'a' is still being handled after 12 s",
        ),
        (
            reasons.HeldBackBytesLimit(held_back_bytes=8, all_shards=True),
            "8 bytes of records of all shards wait for unfinished records of their keys",
        ),
        (
            reasons.StoppedByHandler(position="7:0", partition_key="a", attempts=1, error="ValueError"),
            "stopped at record 7:0 of key 'a': its handler failed with ValueError",
        ),
        (
            reasons.StoppedByHandler(position="7:0", partition_key="a", attempts=3, error=None, at_shard_end=True),
            (
                "stopped at record 7:0 of key 'a': its handler failed 3 times, and it is not retried at the end of the "
                "shard (at_shard_end='finish')"
            ),
        ),
        (
            reasons.StoppedByCrashes(owner_count=6),
            "stopped: 6 owners in a row died here without any progress",
        ),
    ],
)
def test_details_are_reported_when_they_are_there(reason, text):
    assert reason.text == text

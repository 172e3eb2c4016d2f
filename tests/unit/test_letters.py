"""A dead letter: its key, its fingerprint, its JSON form."""

import json

import msgspec
import pytest
from hypothesis import given, strategies as st

from anabranch.errors import CodecError
from anabranch.letters import Failure, Letter, decode_letter, encode_letter, fingerprint, idempotency_key, make_letter
from anabranch.records import Record

RECORD = Record(
    stream="orders", shard_id="shardId-000000000000", sequence_number="49" + "0" * 54, sub_sequence_number=3,
    partition_key="kunde-\u00e9", explicit_hash_key="7", arrival_seconds=1_700_000_000.25, data=b"\x00\xff bytes",
)  # fmt: skip


def letter_of(record=RECORD, *, failure=None, **more):
    given = {"app": "billing", "stream_created_seconds": 1_699_999_999.5, "attempts": 3, "written_seconds": 1.5e9}
    return make_letter(
        stream=RECORD.stream, shard_id=RECORD.shard_id, sequence_number=RECORD.sequence_number,
        sub_sequence_number=RECORD.sub_sequence_number, record=record,
        failure=failure or Failure.of(ValueError("bad amount")), **{**given, **more},
    )  # fmt: skip


def raised(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 -- whatever it raises is the subject
        return error


def charge(amount):
    return int(amount)


def refund(amount):
    return int(amount)


def test_a_letter_has_the_record_and_the_failure():
    letter = letter_of(failure=Failure.of(raised(charge, "ten")), attempted_seconds=[1.0, 2.0, 3.0])
    assert (letter.payload, letter.partition_key, letter.explicit_hash_key) == (RECORD.data, RECORD.partition_key, "7")
    assert letter.error_type == "ValueError"
    assert "'ten'" in letter.message
    assert "in charge" in letter.stack
    assert letter.attempted_seconds == (1.0, 2.0, 3.0)
    assert letter.place == f"orders/shardId-000000000000 {RECORD.sequence_number}:3"


def test_the_letter_of_a_trimmed_record_has_no_payload_and_the_same_key():
    letter = letter_of(None, failure=Failure(error_type="KeyError", fingerprint="f" * 16), recovered=True)
    assert (letter.payload, letter.partition_key, letter.arrival_seconds) == (None, None, None)
    assert letter.idempotency_key == letter_of().idempotency_key
    assert letter.recovered


def test_every_part_of_the_place_counts_in_the_idempotency_key():
    first = ("billing", "orders", 1_700_000_000.0, "shardId-1", "49", -1)
    others = ("sales", "payments", 1_700_000_001.0, "shardId-2", "50", 0)
    keys = {idempotency_key(*(*first[:n], others[n], *first[n + 1 :])) for n in range(6)}
    assert len({*keys, idempotency_key(*first)}) == 7
    assert idempotency_key(*first) == idempotency_key("billing", "orders", 1_700_000_000.9, "shardId-1", "49", -1)


def test_the_idempotency_key_never_changes_between_versions():
    key = idempotency_key("billing", "orders", 1_700_000_000.0, "shardId-000000000000", "49", -1)
    assert key == "58d8584648e7699441866c4e5ee9671de93ce22c08f3924ebd4bedfa2a8bc39a"


def test_failures_of_one_kind_have_one_fingerprint():
    assert fingerprint(raised(charge, "ten")) == fingerprint(raised(charge, "eleven"))
    assert fingerprint(raised(charge, "ten")) != fingerprint(raised(refund, "ten"))
    assert fingerprint(raised(charge, "ten")) != fingerprint(raised(charge, None))


def test_an_error_without_frames_is_identified_by_its_message_without_variable_parts():
    one, two = ValueError("order 17 of 'anna' at 0xff"), ValueError("order 18 of 'bob' at 0xaa")
    assert fingerprint(one) == fingerprint(two) != fingerprint(ValueError("another order"))


def test_an_error_whose_text_raises_still_makes_a_letter():
    class BrokenError(Exception):
        def __str__(self):
            raise RuntimeError

    assert Failure.of(BrokenError()).message == "(its text cannot be shown)"


def test_the_json_form_is_ascii_and_comes_back_whole():
    letter = letter_of(failure=Failure(error_type="E", message="na\u00efve", fingerprint="0"))
    body = encode_letter(letter)
    assert body.isascii()
    assert decode_letter(body) == letter
    assert json.loads(body)["schema_version"] == 1


def test_text_that_is_not_unicode_is_escaped_when_the_letter_is_made():
    failure = Failure.of(raised(int, "\ud800"))
    assert "\\ud800" in failure.message
    assert "\\ud800" in failure.stack
    letter = letter_of(failure=Failure(error_type="E", message="\udfff", fingerprint="0"))
    assert decode_letter(encode_letter(letter)).message == "\\udfff"


def test_a_letter_with_an_infinite_time_or_half_a_character_is_refused():
    fields = json.loads(encode_letter(letter_of()))
    for wrong in ({"written_seconds": float("inf")}, {"extra_field": float("nan")}, {"message": "\ud800"}):
        with pytest.raises(CodecError):
            decode_letter(json.dumps({**fields, **wrong}))


def test_fields_of_a_newer_version_are_kept():
    newer = {**json.loads(encode_letter(letter_of())), "schema_version": 2, "tenant": {"id": 7}}
    letter = decode_letter(json.dumps(newer))
    assert letter.extra == {"tenant": {"id": 7}}
    assert json.loads(encode_letter(msgspec.structs.replace(letter, redrive_count=1))) == {**newer, "redrive_count": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{}", b"\xff", b'{"payload": "!"}', b"[" * 100_000, b"7"])
def test_what_is_no_letter_is_refused(body):
    with pytest.raises(CodecError, match="not a dead letter"):
        decode_letter(body)


TIMES = st.floats(min_value=0, max_value=1e12)


@given(
    st.builds(
        Letter, extra=st.none(), sequence_number=st.just("7"), stream_created_seconds=TIMES, written_seconds=TIMES,
        arrival_seconds=st.none() | TIMES, attempted_seconds=st.lists(TIMES).map(tuple),
    )
)  # fmt: skip
def test_every_letter_comes_back_whole(letter):
    assert decode_letter(encode_letter(letter)) == letter

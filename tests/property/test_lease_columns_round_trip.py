"""Whatever a row holds, its columns hold: every field that a row has or will have survives SQLite."""

import sqlite3
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import AppRow, ControlRow, LeaseRow, MemberRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Position, StartingPosition, after_sequence_number, at_timestamp
from anabranch.limits import HASH_KEY_MAX
from anabranch.reasons import Reason, StoppedByHandler, UnknownReason
from anabranch.stores import RowKey, Scope, decode_row, encode_row, sqlite

NUMBERS = st.integers(0, 2**63 - 1)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SEQUENCE_NUMBERS = st.integers(0, 10**129 - 1)
HASH_KEYS = st.integers(0, HASH_KEY_MAX)
SPECIAL = {
    int: NUMBERS,
    float: SECONDS,
    str: TEXT,
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    dict[str, str]: st.dictionaries(TEXT, TEXT, max_size=2),
    dict[str, Any]: st.dictionaries(
        st.sampled_from(["colour", "size"]), st.one_of(TEXT, NUMBERS, st.none()), max_size=2
    ),
    Position: st.builds(Position, SEQUENCE_NUMBERS, st.integers(-1, 2**31)),
    Reason: st.one_of(
        st.builds(StoppedByHandler, position=TEXT, partition_key=TEXT, attempts=NUMBERS, error=TEXT),
        st.builds(UnknownReason, code=TEXT.map("new-{}".format), text=TEXT.map("text {}".format)),
    ),
    HashKeyRange: st.builds(HashKeyRange, HASH_KEYS, HASH_KEYS),
    StartingPosition: st.one_of(
        st.just(TRIM_HORIZON), st.builds(at_timestamp, SECONDS), st.builds(after_sequence_number, SEQUENCE_NUMBERS)
    ),
}

KINDS = {"app": AppRow, "stream": StreamRow, "lease": LeaseRow, "member": MemberRow, "command": ControlRow}


def values(kind):
    """A strategy for any type that a row is made of, taken from the row's own fields."""
    if kind in SPECIAL:
        return SPECIAL[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return st.builds(kind, **{field.name: values(field.type) for field in fields})
    origin, arguments = getattr(kind, "__origin__", None), getattr(kind, "__args__", ())
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is not None:  # Literal
        return st.sampled_from(arguments)
    return st.one_of(*(st.none() if one is type(None) else values(one) for one in arguments))


SHORT_NAMES = st.lists(st.text("aZ09-_/:~", min_size=1, max_size=30), max_size=8).map(tuple)
SPECIAL[MemberRow] = st.builds(
    MemberRow,
    **{field.name: values(field.type) for field in msgspec.structs.fields(MemberRow)}
    | dict.fromkeys(("streams", "changed", "wanted"), SHORT_NAMES),
)


def through_sqlite(statements, kind, row, app="a"):
    connection, table = sqlite3.connect(":memory:", isolation_level=None), sqlite.TABLES[kind]
    app, app_id = (row.app, "") if kind == "app" else (app, "id")
    try:
        sqlite.create_tables(connection, statements)
        table.put(connection, RowKey(kind, app, app_id), row)
        (found,) = table.scan(connection, Scope(kind, app, app_id))
        return found
    finally:
        connection.close()


@given(values(LeaseRow), TEXT)
def test_a_lease_is_read_as_it_was_written(row, app):
    assert through_sqlite(sqlite.LEASES, "lease", row, app) == row


@given(values(MemberRow), TEXT)
def test_a_member_is_read_as_it_was_written(row, app):
    assert through_sqlite(sqlite.MEMBERS, "member", row, app) == row


@given(values(StreamRow), TEXT)
def test_a_stream_is_read_as_it_was_written(row, app):
    assert through_sqlite(sqlite.LEASES, "stream", row, app) == row


@given(values(ControlRow), TEXT)
def test_a_command_is_read_as_it_was_written(row, app):
    assert through_sqlite(sqlite.LEASES, "command", row, app) == row


@given(values(AppRow))
def test_an_application_is_read_as_it_was_written(row):
    assert through_sqlite(sqlite.LEASES, "app", row) == row


@given(st.one_of(*(values(kind).map(lambda row, name=name: (name, row)) for name, kind in KINDS.items())))
def test_a_row_is_the_same_after_json(found):
    kind, row = found
    assert decode_row(kind, encode_row(row)) == row


def test_bytes_that_are_no_row_are_refused():
    with pytest.raises(ValueError, match="must have the fields owner, count"):
        decode_row("lease", b'{"stream": "a", "generation": 0, "shard": "b"}')
    with pytest.raises(ValueError, match=r"unknown kind of row 'leas'; the kinds are app,"):
        decode_row("leas", b"{}")
    with pytest.raises(ValueError, match="JSON is malformed"):
        decode_row("lease", b"nothing")

"""Law: the pieces of a PutRecords request join to its whole JSON, and none is larger than 64 KiB."""

import base64
import json
import random

from hypothesis import given, strategies as st

from anabranch._model.streams import StreamName
from anabranch._wire.bodies import PIECE_BYTES_MAX, encode_put_records
from anabranch._wire.messages import PutRecordsEntry

sizes = st.one_of(
    st.integers(0, 200),
    st.integers(24_570, 24_580),
    st.integers(49_140, 49_160),
    st.integers(0, 200_000),
)
keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=256)
hash_keys = st.none() | st.integers(0, (1 << 128) - 1).map(str)


@given(st.lists(st.tuples(sizes, keys, hash_keys), max_size=12), st.integers(0, 1 << 32))
def test_pieces_join_to_the_whole_and_are_bounded(shapes, seed) -> None:
    entropy = random.Random(seed)
    entries = [PutRecordsEntry(entropy.randbytes(size), key, hash_key) for size, key, hash_key in shapes]
    pieces = encode_put_records(StreamName("orders"), entries)
    assert all(0 < len(piece) <= PIECE_BYTES_MAX for piece in pieces)
    body = json.loads(b"".join(pieces))
    assert body["StreamName"] == "orders"
    assert [
        PutRecordsEntry(
            base64.b64decode(record["Data"], validate=True), record["PartitionKey"], record.get("ExplicitHashKey")
        )
        for record in body["Records"]
    ] == entries

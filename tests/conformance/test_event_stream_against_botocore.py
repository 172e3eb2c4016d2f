"""What we frame botocore reads, and what botocore reads of a stream's bytes we read too."""

import pytest
from botocore.eventstream import EventStreamBuffer, ParserError
from hypothesis import given, strategies as st

from anabranch._wire.event_stream import Message, MessageDecoder, encode_message
from anabranch.errors import CodecError

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
values = st.text(st.characters(codec="utf-8"), max_size=40)
messages = st.builds(Message, st.dictionaries(names, values, max_size=5), st.binary(max_size=200))


@given(st.lists(messages, max_size=4))
def test_botocore_reads_what_we_frame(sent) -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(b"".join(encode_message(message.headers, message.payload) for message in sent))
    received = list(buffer)
    assert [event.headers for event in received] == [dict(message.headers) for message in sent]
    assert [event.payload for event in received] == [message.payload for message in sent]


@pytest.mark.parametrize("at", range(40))
def test_a_stream_that_botocore_refuses_we_refuse(at: int) -> None:
    data = bytearray(encode_message({"name": "value"}, b"payload"))
    data[at % len(data)] ^= 1
    buffer = EventStreamBuffer()
    buffer.add_data(bytes(data))
    with pytest.raises(ParserError):
        list(buffer)
    with pytest.raises(CodecError):
        MessageDecoder().feed(data)

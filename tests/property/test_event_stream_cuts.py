"""Law: however a stream of frames is cut, the same messages come out, in order, and nothing is left over."""

from hypothesis import given, strategies as st

from anabranch._wire.event_stream import Message, MessageDecoder, encode_message

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)
values = st.text(st.characters(codec="utf-8"), max_size=20)
messages = st.builds(Message, st.dictionaries(names, values, max_size=4), st.binary(max_size=100))


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 300), max_size=30))
def test_however_the_bytes_are_cut_the_messages_are_the_same(sent, cuts) -> None:
    stream = b"".join(encode_message(message.headers, message.payload) for message in sent)
    decoder = MessageDecoder()
    received: list[Message] = []
    position = 0
    for size in [*cuts, len(stream)]:
        received += decoder.feed(stream[position : position + size])
        position += size
    assert received == sent
    assert decoder.buffered_bytes == 0

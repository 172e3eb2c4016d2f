"""Law: positions are ordered as the records of their shard are, and come back as they were written down."""

from hypothesis import given, strategies as st

from anabranch._model.streams import BEFORE_FIRST_SUB, Position, parse_sequence_number

NUMBERS = st.integers(0, 10**129 - 1) | st.integers(0, 3)
POSITIONS = st.builds(Position, NUMBERS, st.just(BEFORE_FIRST_SUB) | st.integers(0, 200_000) | st.integers(0, 3))


@given(number=NUMBERS)
def test_a_sequence_number_is_itself_after_being_written(number):
    assert parse_sequence_number(str(number)) == number


@given(position=POSITIONS)
def test_a_position_is_itself_after_being_written(position):
    assert Position.parse(str(position)) == position


@given(text=st.from_regex(r"[0-9:]*", fullmatch=True) | st.text())
def test_a_position_that_can_be_read_was_written_in_the_one_way_there_is(text):
    try:
        position = Position.parse(text)
    except ValueError:
        return
    assert str(position) == text


@given(left=POSITIONS, right=POSITIONS)
def test_positions_are_ordered_by_number_and_then_by_sub_sequence_number(left, right):
    if left.sequence_number != right.sequence_number:
        assert (left < right) == (left.sequence_number < right.sequence_number)
    else:
        assert (left < right) == (left.sub_sequence_number < right.sub_sequence_number)


@given(number=NUMBERS, sub_sequence_number=st.integers(0, 200_000))
def test_a_whole_record_sorts_before_its_sub_records_and_they_before_the_next_record(number, sub_sequence_number):
    assert Position(number) < Position(number, sub_sequence_number) < Position(number + 1)

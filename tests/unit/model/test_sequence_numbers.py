"""Sequence numbers, and positions as they are written down."""

import pytest

from anabranch._model.streams import BEFORE_FIRST_SUB, Position, is_sequence_number, parse_sequence_number

AWS = "49590338271490256608559692538361571095921575989136588898"


@pytest.mark.parametrize("text", ["0", "1", AWS, "9" * 129])
def test_a_sequence_number_is_a_decimal_of_up_to_129_digits(text):
    assert is_sequence_number(text)
    assert parse_sequence_number(text) == int(text)


@pytest.mark.parametrize("text", ["", "00", "01", "-1", " 1", "1\n", "1_0", "\u0661", "TRIM_HORIZON", "1:0", "9" * 130])
def test_anything_else_is_refused_by_name(text):
    assert not is_sequence_number(text)
    with pytest.raises(ValueError, match="a sequence number is a decimal integer without leading zeros"):
        parse_sequence_number(text)


def test_a_position_is_written_with_its_sub_sequence_number_where_it_has_one():
    assert str(Position(int(AWS))) == AWS
    assert str(Position(int(AWS), 0)) == f"{AWS}:0"
    assert str(Position(int(AWS), 12)) == f"{AWS}:12"


def test_a_position_without_a_sub_sequence_number_is_before_all_that_have_one():
    assert Position(5).sub_sequence_number == BEFORE_FIRST_SUB
    assert Position(4, 99) < Position(5) < Position(5, 0) < Position(5, 1) < Position(6)


@pytest.mark.parametrize("text", ["5:", "5:-1", "5:a", "5: 1", "5:1:2", "5:01", "5:\u0661", "5:" + "9" * 5000])
def test_a_position_with_no_proper_sub_sequence_number_is_refused_by_name(text):
    with pytest.raises(ValueError, match="a position is a sequence number, or one with ':'"):
        Position.parse(text)


@pytest.mark.parametrize("text", ["", ":1", "x:1", "05:1"])
def test_a_position_with_no_proper_sequence_number_is_refused_by_name(text):
    with pytest.raises(ValueError, match="a sequence number is a decimal integer"):
        Position.parse(text)

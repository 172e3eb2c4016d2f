"""What an error says, in words that a lease row can keep."""

import pytest

from anabranch._engine.handler_calls import CHARACTERS_MAX, error_text


class Mute(Exception):  # noqa: N818 -- as users name theirs
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (TimeoutError(), "TimeoutError"),
        (Mute(), "Mute"),
        (OSError("no file caf\udce9.csv"), "OSError: no file caf\\udce9.csv"),
    ],
)
def test_every_error_can_be_told(error, text):
    assert error_text(error) == text
    error_text(error).encode()


def test_no_more_is_kept_than_a_row_has_room_for():
    assert error_text(ValueError("x" * 5_000_000)) == f"ValueError: {'x' * CHARACTERS_MAX}"

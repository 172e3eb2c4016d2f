"""One byte budget for all that was read and not finished."""

import pytest

from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.errors import ConfigurationError


def test_a_budget_that_no_read_fits_in_is_refused():
    with pytest.raises(ConfigurationError, match="a budget of 1000 bytes is too small: one read may need 25165824"):
        Budget(1000)


def test_room_is_given_until_there_is_none_and_again_when_it_came_back():
    budget = Budget(READ_RESERVE_BYTES)
    assert budget.try_reserve(READ_RESERVE_BYTES)
    assert not budget.try_reserve(1)
    budget.release(10)
    assert budget.try_reserve(10)
    assert (budget.used_bytes, budget.peak_bytes) == (READ_RESERVE_BYTES, READ_RESERVE_BYTES)


def test_who_waits_is_called_once_and_may_wait_again():
    budget, calls = Budget(), []
    budget.try_reserve(3)

    def on_room():
        calls.append(budget.used_bytes)
        budget.wait(on_room)

    budget.wait(on_room)
    budget.release(1)
    budget.release(1)
    assert calls == [2, 1]


def test_releasing_more_than_was_reserved_is_a_bug():
    with pytest.raises(AssertionError, match="more released than reserved"):
        Budget().release(1)

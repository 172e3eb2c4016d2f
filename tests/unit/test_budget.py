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


def test_a_waiter_is_called_when_there_is_room_and_may_wait_again():
    budget, calls = Budget(READ_RESERVE_BYTES), []
    budget.try_reserve(READ_RESERVE_BYTES)

    def on_room():
        calls.append(budget.used_bytes)
        budget.try_reserve(2)
        budget.call_when_free(2, on_room)

    budget.call_when_free(2, on_room)
    budget.release(1)
    assert calls == []
    budget.release(3)
    assert calls == [READ_RESERVE_BYTES - 4, READ_RESERVE_BYTES - 2]
    budget.release(2)
    assert calls == [READ_RESERVE_BYTES - 4, READ_RESERVE_BYTES - 2, READ_RESERVE_BYTES - 2]


def test_freed_room_goes_to_the_longest_waiter_and_then_to_each_in_turn():
    budget, calls = Budget(READ_RESERVE_BYTES), []
    budget.try_reserve(READ_RESERVE_BYTES)

    def waiter(name):
        def on_room():
            calls.append(name)
            budget.try_reserve(1)
            budget.call_when_free(1, on_room)

        return on_room

    for name in ("many shards", "one shard"):
        budget.call_when_free(1, waiter(name))
    for _ in range(4):
        budget.release(1)
    assert calls == ["many shards", "one shard"] * 2


def test_releasing_more_than_was_reserved_is_a_bug():
    with pytest.raises(AssertionError, match="more released than reserved"):
        Budget().release(1)

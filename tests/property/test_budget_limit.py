"""Law (P5): a budget is never overdrawn, and whoever waits for room is called once for each time that it asked."""

from hypothesis import given, strategies as st

from anabranch.budget import READ_RESERVE_BYTES, Budget

STEPS = st.lists(st.tuples(st.sampled_from(["reserve", "release", "wait"]), st.integers(0, READ_RESERVE_BYTES)))


@given(steps=STEPS, extra=st.integers(0, READ_RESERVE_BYTES))
def test_a_budget_is_never_overdrawn_and_forgets_nobody(steps, extra):
    budget = Budget(READ_RESERVE_BYTES + extra)
    held, called, waiting, asked = [], [], 0, 0
    for action, amount in steps:
        used = sum(held)
        if action == "reserve":
            reserved = budget.try_reserve(amount)
            assert reserved == (used + amount <= budget.limit_bytes)
            held += [amount] * reserved
        elif action == "wait":
            budget.wait(lambda number=asked: called.append(number))
            waiting, asked = waiting + 1, asked + 1
        elif held:
            budget.release(held.pop())
            waiting = 0
        assert budget.used_bytes == sum(held) <= budget.peak_bytes <= budget.limit_bytes
        assert called == list(range(asked - waiting))

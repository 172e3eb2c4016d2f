"""Law (P5): a budget is overdrawn by its overdraft at most; who waits is called once, in turn, when there is room."""

from functools import partial

from hypothesis import given, strategies as st

from anabranch.budget import READ_RESERVE_BYTES, Budget

STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "overdraw", "release", "wait"]), st.integers(0, READ_RESERVE_BYTES))
)


@given(steps=STEPS, extra=st.integers(0, READ_RESERVE_BYTES))
def test_a_budget_is_overdrawn_by_one_response_at_most_and_calls_every_waiter(steps, extra):
    budget = Budget(READ_RESERVE_BYTES + extra)
    held, called, asked = [], [], []
    for action, amount in steps:
        used = sum(held)
        if action == "reserve":
            reserved = budget.try_reserve(amount)
            assert reserved == (used + amount <= budget.limit_bytes)
            held += [amount] * reserved
        elif action == "overdraw":
            taken = budget.try_overdraw(amount)
            assert taken == (used + amount <= budget.limit_bytes + READ_RESERVE_BYTES)
            held += [amount] * taken
        elif action == "wait":
            asked.append(amount)
            budget.call_when_free(amount, partial(called.append, len(asked)))
        elif held:
            budget.release(held.pop())
            assert len(called) == len(asked) or not budget.has_room(asked[len(called)])
        assert budget.used_bytes == sum(held) <= budget.peak_bytes <= budget.limit_bytes + READ_RESERVE_BYTES
        assert called == list(range(1, len(called) + 1))

"""Calls that must succeed: repeated until the store answers, and none of them waited for without end."""

import asyncio

import pytest

from anabranch._engine.leases.store_calls import TRIES_MAX, retry_store_call
from anabranch._engine.ports import Ports
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import run


class ClockThatSkips:
    """Sleeps take no time."""

    def now_ms(self):
        return 0

    async def sleep_until_ms(self, at_ms):
        await asyncio.sleep(0)


TOLD = []
OUTSIDE = Ports(kinesis=None, store=MemoryLeaseStore(), clock=ClockThatSkips(), entropy=None, emit=TOLD.append)


def test_a_call_that_never_answers_is_given_up_and_made_again():
    async def main():
        tries = []

        async def call():
            tries.append(1)
            if len(tries) == 1:
                await asyncio.Event().wait()
            return "an answer"

        assert await retry_store_call(OUTSIDE, call, deadline_ms=10) == "an answer"
        assert len(tries) == 2

    run(main, 5)


def test_a_store_that_never_answers_is_named_in_the_end():
    async def main():
        async def call():
            await asyncio.Event().wait()

        with pytest.raises(LeaseStoreError, match=rf"memory:// gave no answer within 1 ms, {TRIES_MAX} times in a row"):
            await retry_store_call(OUTSIDE, call, deadline_ms=1)

    run(main, 5)


@pytest.mark.parametrize("error, tries", [(LeaseStoreError, TRIES_MAX), (LeaseStoreInvalidError, 1)])
def test_an_error_is_raised_at_once_if_it_is_for_good_and_after_the_last_try_if_not(error, tries):
    async def main():
        made = []

        async def call():
            made.append(1)
            raise error("no")

        with pytest.raises(error):
            await retry_store_call(OUTSIDE, call, deadline_ms=1000)
        assert len(made) == tries

    run(main, 5)


def test_a_store_that_does_not_answer_is_told_of_from_the_second_time_on_and_ever_more_seldom():
    async def main():
        tries = []

        async def call():
            tries.append(1)
            if len(tries) < 10:
                raise LeaseStoreError("the disk is full")

        TOLD.clear()
        await retry_store_call(OUTSIDE, call, deadline_ms=1_000)
        assert [event.failure_count for event in TOLD] == [2, 4, 8]
        assert "the disk is full" in str(TOLD[0])

    run(main, 5)

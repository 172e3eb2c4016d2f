"""Coalesced calls: how many are made, and that each starts after it was asked for."""

import asyncio

import pytest

from anabranch._engine.shard_discovery import CoalescedCall

from stream_world import run


def test_callers_before_a_call_starts_share_it_and_callers_during_it_get_the_next():
    async def main():
        begun, go_on = [], asyncio.Event()

        async def look():
            begun.append(1)
            await go_on.wait()

        shared = CoalescedCall(look)
        first = [asyncio.create_task(shared.wait()) for _ in range(10)]
        await asyncio.sleep(0)
        later = [asyncio.create_task(shared.wait()) for _ in range(10)]
        await asyncio.sleep(0)
        assert len(begun) == 1
        go_on.set()
        await asyncio.gather(*first, *later)
        assert len(begun) == 2

    run(main)


def test_a_failed_call_does_not_count():
    async def main():
        looks = []

        async def look():
            looks.append(1)
            if len(looks) == 1:
                raise OSError("away")

        shared = CoalescedCall(look)
        results = await asyncio.gather(shared.wait(), shared.wait(), return_exceptions=True)
        assert [type(result) for result in results] == [OSError, type(None)]
        with pytest.raises(ZeroDivisionError):
            await CoalescedCall(lambda: 1 / 0).wait()
        assert len(looks) == 2

    run(main)

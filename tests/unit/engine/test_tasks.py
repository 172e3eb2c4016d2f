"""Tasks that start in a group."""

import asyncio

import pytest

from anabranch._engine.tasks import start_in_group


def test_nothing_is_begun_in_a_group_that_is_going_down_and_that_is_no_second_error():
    begun = []

    async def late():
        begun.append(1)

    async def fail():
        raise ValueError("the reason")

    async def main():
        async with asyncio.TaskGroup() as group:
            assert start_in_group(group, fail(), "fail")
            try:
                await asyncio.sleep(60)
            finally:
                assert not start_in_group(group, late(), "late")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert [str(error) for error in caught.value.exceptions] == ["the reason"]
    assert begun == []

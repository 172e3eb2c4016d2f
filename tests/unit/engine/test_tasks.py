"""Tasks that start in a group."""

import asyncio

import pytest

from anabranch._engine.tasks import start_in_group


def test_a_task_for_a_group_that_is_shutting_down_is_not_started_and_raises_nothing():
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

"""The whole client on uvloop instead of asyncio's own loop: TLS, writes, reads, a split, and a stop."""

import asyncio
import sys
from contextlib import AsyncExitStack

import pytest

from anabranch import Producer
from anabranch.records import Record
from patience import PATIENCE

from stream_world import check_order, numbers, stream_world, until

KEYS = [f"user-{number}" for number in range(12)]


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop has no build for Windows")
@pytest.mark.parametrize("read", ["polling", "fanout"])
def test_a_producer_and_a_consumer_run_on_uvloop(tmp_path, monkeypatch, read):
    import uvloop

    async def main():
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        seen: list[Record[bytes]] = []

        async def handle(record: Record[bytes]) -> None:
            seen.append(record)
            await asyncio.sleep(0)

        async with asyncio.timeout(PATIENCE), stream_world(2, tls=True) as world, AsyncExitStack() as stack:
            monkeypatch.setenv("AWS_CA_BUNDLE", str(world.kinesis.certificate_path))
            producer = await stack.enter_async_context(Producer(world.stream, aws=world.aws))
            consumer = world.consumer(
                app="billing", leases=f"sqlite://{tmp_path}/leases.db", read=read, start="trim_horizon", order="key"
            )
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            for number in range(60):
                assert (await producer.put_and_wait(str(number).encode(), KEYS[number % len(KEYS)])).delivered
                if number == 30:
                    world.split()
            await until(lambda: len(seen) >= 60, "all records")
            await consumer.stop()
            assert (await running).clean
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(60))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())

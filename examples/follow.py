"""Follows a stream from its tip, as `tail -f` follows a file. It stores no position."""

import asyncio

import anabranch


async def write() -> None:
    async with anabranch.Producer("orders") as producer:
        for number in range(50):
            await producer.put(f"order {number}".encode(), f"customer-{number % 5}")


async def main() -> None:
    async with anabranch.Consumer("orders", idle_timeout=5) as consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        seen = 0
        async for record in consumer:
            seen += 1
            print(record.partition_key, record.data.decode())
            if seen == 50:
                break
    print(f"followed {seen} records")


asyncio.run(main())

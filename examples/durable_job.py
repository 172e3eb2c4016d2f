"""A job that runs from time to time: each run handles what arrived since the last one, and ends at the tip."""

import asyncio

import anabranch


async def write(first: int) -> None:
    async with anabranch.Producer("orders") as producer:
        await producer.put_many(
            (f"customer-{number % 7}", str(number).encode()) for number in range(first, first + 100)
        )


async def run() -> list[int]:
    async with anabranch.Consumer("orders", app="nightly", until="tip") as consumer:
        return [int(record.data) async for record in consumer]


async def main() -> None:
    await write(0)
    first = await run()
    await write(100)
    second = await run()
    print(f"first run {len(first)} records, second run {len(second)}, in both {len({*first} & {*second})}")


asyncio.run(main())
